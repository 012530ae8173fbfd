"""A model as the native kernels read it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rootlace.kernels import Dense, Quantised, Weight
from rootlace.kernels.native import library as native
from rootlace.kernels.native.linear import (
    DTYPES,
    Epilogue,
    Packed,
    Packer,
    ProductPath,
    parts_packed,
    why_not,
)
from rootlace.kernels.reference.layers import dense, dequantise
from rootlace.kernels.weights import CODES, parts_of
from rootlace.runtime.model.checkpoint.quantised.reading import QUANTISED
from rootlace.runtime.model.checkpoint.weights import PRODUCTS, Blocks, LayerWeights, ModelWeights
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.lora import Adapter, LowRank

# Packed weights -----------------------------------------------------------------------------------
#
# A model's weights packed for the native kernels, each by its name.
#
# Names are those of `LayerWeights`' fields with the layer's number before them: `layers.3.qkv`,
# `layers.3.experts.0.down`, `layers.3.post_norm`, `layers.3.post_norm.bias`.


PARTS = 3
"""At most this many products of unlike weights make up queries, keys and values."""
NORMS = ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm")
"""Norms of the residual stream, by the fields of `LayerWeights`."""
UNSORTED = ("head", "router", "shared_gate", "experts.")
"""Names, or how they begin, of weights whose activations are not put into another order."""


@dataclass(frozen=True)
class PackedWeights:
    """`linears`: the weights of products, of queries, keys and values up to `PARTS`, of latent
    attention's `k_up` and `v_up` one for each head. `tensors`: the embedding and learned positions
    in the activations' type; norms, sinks and corrections in float32. An embedding that a GGUF file
    has in blocks stays as it is, as `embedding_blocks`.
    `remarks`: what users should know of how they are packed. `mapped`: bytes that are a file's, of
    which the system says that they are free. `damage`: set when that file turns out to be
    damaged."""

    linears: Mapping[str, tuple[Packed, ...]]
    tensors: Mapping[str, torch.Tensor]
    embedding_blocks: Blocks | None = None
    remarks: tuple[str, ...] = ()
    mapped: int = 0
    damage: threading.Event = field(default_factory=threading.Event)


def pack_weights(packer: Packer, spec: ModelSpec, weights: ModelWeights) -> PackedWeights:
    """Each layer, and each expert in it, is asked for once, in order, so that one which is read
    from a file then need not be in memory beside the packed ones.

    Codes that have no kernels become the numbers that they stand for: a remark says so."""
    packing = _Packing(packer, spec)
    linears: dict[str, tuple[Packed, ...]] = {}
    if weights.head is not None:
        linears["head"] = packing.of("head", weights.head)
    weights.release()
    blocks = weights.embedding_blocks
    embedding = weights.embedding if blocks is None else None
    tensors = {"embedding": embedding, "positions": weights.positions}
    tensors |= {
        "final_norm": _float32(weights.final_norm),
        "final_norm.bias": _float32(weights.final_norm_bias),
    }
    for index, layer in enumerate(weights.layers):
        for name, weight in _products(layer):
            linears[f"layers.{index}.{name}"] = packing.of(name, weight)
        for name, heads in _by_head(spec, layer):
            linears[f"layers.{index}.{name}"] = tuple(map(packer.pack, heads))
        for name, tensor in _tensors(layer):
            tensors[f"layers.{index}.{name}"] = _float32(tensor)
    there = {name: one.contiguous() for name, one in tensors.items() if one is not None}
    return PackedWeights(linears, there, blocks, packing.remarks)


def _products(layer: LayerWeights) -> Iterator[tuple[str, Weight]]:
    for name in PRODUCTS:
        weight = getattr(layer, name)
        if weight is not None and name != "kv_up":
            yield name, weight
    for number, expert in enumerate(layer.experts):
        yield f"experts.{number}.gate_up", expert.gate_up
        yield f"experts.{number}.down", expert.down


def _by_head(spec: ModelSpec, layer: LayerWeights) -> Iterator[tuple[str, Iterable[Weight]]]:
    """Of latent attention: what makes latents of each head's query, [rank, plain], and values of
    latents, [values, rank]."""
    latent = spec.attention.latent
    if latent is None or layer.kv_up is None:
        return
    heads = layer.kv_up.matrix.unflatten(0, (spec.attention.num_heads, -1))
    yield "k_up", (Dense(head[: latent.plain].T) for head in heads)
    yield "v_up", (Dense(head[latent.plain :]) for head in heads)


def _tensors(layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name in NORMS:
        weight, bias = layer.norm(name)
        yield name, weight
        yield f"{name}.bias", bias
    for name in ("q_norm", "k_norm", "sinks", "correction"):
        yield name, getattr(layer, name)


class _Packing:
    def __init__(self, packer: Packer, spec: ModelSpec) -> None:
        self._packer = packer
        self._gated_mlp = spec.mlp.gated
        self._unpacked: dict[str, str] = {}

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(
            f"weights of {kind} take the memory of dense ones: {reason}"
            for reason, kind in self._unpacked.items()
        )

    def of(self, name: str, weight: Weight) -> tuple[Packed, ...]:
        if name == "qkv":
            parts = parts_of(weight)
            if len(parts) > PARTS:
                parts = (dense(weight, self._packer.dtype),)
            return tuple(self._packed(part) for part in parts)
        if name.startswith(UNSORTED):
            weight = self._in_order(weight)
        gated = name == "gate_up" and self._gated_mlp
        return (self._packed(weight, gated=gated or name.endswith(".gate_up")),)

    def _in_order(self, weight: Weight) -> Weight:
        """A weight with its columns in the model's order."""
        if all(isinstance(part, Dense) or part.order is None for part in parts_of(weight)):
            return weight
        reason = "the native kernels cannot sort the columns of a head or of experts"
        self._unpacked.setdefault(reason, weight.kind)
        return dense(weight, self._packer.dtype)

    def _packed(self, weight: Weight, *, gated: bool = False) -> Packed:
        if any(isinstance(part, Quantised) for part in parts_of(weight)):
            reason = why_not(parts_packed(weight, gated), gated)
            if reason is not None:
                self._unpacked.setdefault(reason, weight.kind)
                weight = dense(weight, self._packer.dtype)
        return self._packer.pack(weight, gated=gated)


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


# Stored rows --------------------------------------------------------------------------------------


class StoredRows:
    """Rows of a matrix in a file's blocks, as numbers: a table of those that were asked for lately,
    which takes little memory where the whole matrix takes half a gigabyte. Not thread-safe."""

    ROWS = 2048

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        self._data, self._read = blocks.data, QUANTISED[blocks.type]
        self._place = np.full(len(blocks.data), -1, np.int32)
        self._used = 0
        width = self._read(blocks.data[:1]).shape[1]
        with torch.inference_mode(False):  # so that rows can be read in any mode
            self.table = torch.empty((self.ROWS, width), dtype=dtype)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """int32: where in `table`, from its beginning on until the next call, these rows are."""
        found = self._place[rows]
        if len(found) and found.min() < 0:
            missing = np.unique(rows[found < 0])
            if self._used + len(missing) > len(self.table):
                self._place.fill(-1)
                self._used, missing = 0, np.unique(rows)
                if len(missing) > len(self.table):
                    with torch.inference_mode(False):
                        self.table = self.table.new_empty((len(missing), self.table.shape[1]))
            end = self._used + len(missing)
            read = dequantise(self._read(self._data[torch.from_numpy(missing)]))
            self.table[self._used : end].copy_(read)
            self._place[missing] = np.arange(self._used, end, dtype=np.int32)
            self._used, found = end, self._place[rows]
        return found


# Native weights -----------------------------------------------------------------------------------


GATED = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
PLAIN = {"relu": Epilogue.RELU, "gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH}
"""Epilogues of an MLP's first product by activation, with a gate and without one."""
KINDS = frozenset({"dense", *CODES})
"""The kinds of weights that the native kernels multiply by."""
STEP = 32
"""Inputs of a product that the tile unit multiplies at a time."""
ADAPTED = ("qkv", "output", "gate_up", "down", "q_up")
"""The products that an `RlLowRank` is added to, in its order."""


class NativeWeights:
    """The `RlModel` of a checkpoint, and the memory that it points to.

    Products read packed weights. The embedding is read by row and stays as it is: the checkpoint's
    mapped file where that has the type, of which the rows that are used take memory; or
    `stored_rows`, which are then to be asked for the rows of each step.
    """

    def __init__(
        self,
        packer: Packer,
        spec: ModelSpec,
        weights: PackedWeights,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._packer = packer
        self._spec = spec
        self._weights = weights
        self._held: list[object] = [weights]
        self.dtype = packer.dtype
        blocks = weights.embedding_blocks
        self.stored_rows = None if blocks is None else StoredRows(blocks, packer.dtype)
        attention, count = spec.attention, spec.num_layers
        layers = (native.Layer * count)()
        for index in range(count):
            self._fill(layers[index], index)
        self._held.append(layers)
        activations = GATED if spec.mlp.gated else PLAIN
        self.model = native.Model(
            dtype=DTYPES[self.dtype],
            hidden=spec.hidden_size,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            inner=max(spec.mlp.inner_size, spec.experts.shared_size if spec.experts else 0),
            num_layers=count,
            vocab=self._logits(),
            activation=activations[spec.mlp.activation],
            layer_norms=spec.norm.kind == "layer",
            joint_norm=attention.joint_norm,
            own_norms=attention.own_norms,
            parallel=spec.parallel,
            eps=spec.norm.eps,
            scale=attention.scale,
            score_cap=attention.soft_cap,
            logit_cap=spec.logit_soft_cap,
            embedding_factor=self._embedding_factor(),
            embedding=self._address("embedding"),
            positions=self._address("positions"),
            final_norm=self._norm("final_norm"),
            mixture=self._mixture(),
            latent=self._latent(),
            layers=layers,
            head=self._linear("head", factor=spec.logit_multiplier),
            adapters=self._adapters(adapters),
            adapter_rank=max((_whole(one.largest_rank()) for one in adapters), default=0),
        )
        """Cache and rotations are still to be set."""

    def _adapters(self, adapters: Sequence[Adapter]) -> ctypes.Array[native.LowRank] | None:
        """Low-rank products of all adapters, adapter by adapter and layer by layer."""
        layers = [layer for adapter in adapters for layer in adapter.layers]
        if not layers:
            return None
        found = (native.LowRank * (len(layers) * len(ADAPTED)))()
        for index, layer in enumerate(layers):
            assert layer.keys() <= set(ADAPTED), "it would be ignored"
            for at, name in enumerate(ADAPTED):
                if name in layer:
                    self._fill_low_rank(
                        found[index * len(ADAPTED) + at],
                        layer[name],
                        self._weights.linears[f"layers.{index % self._spec.num_layers}.{name}"],
                        gated=name == "gate_up" and self._spec.mlp.gated,
                    )
        self._held.append(found)
        return found

    def _fill_low_rank(
        self, to: native.LowRank, part: LowRank, beside: Sequence[Packed], *, gated: bool
    ) -> None:
        """`beside`: the weights of the product, whose outputs b is divided as, and whose paths it
        goes. Ranks get zeros behind them, which add nothing: numbers that fill whole steps of a
        product are not copied for it."""
        missing = _whole(len(part.a)) - len(part.a)
        to.a = self._own(torch.nn.functional.pad(part.a, (0, 0, 0, missing)))
        padded = torch.nn.functional.pad(part.b, (0, missing))
        parts = padded.split([packed.outputs for packed in beside])
        for at, (b, packed) in enumerate(zip(parts, beside, strict=True)):
            to.b[at] = self._own(b, gated=gated, path=packed.path)

    def _logits(self) -> int:
        """How many logits the head makes: one of several ranks has a part of them."""
        head = self._weights.linears.get("head")
        return self._spec.head_rows if head is None else head[0].outputs

    def _embedding_factor(self) -> float:
        factor = self._spec.embedding_multiplier
        if self._spec.rounded_multiplier:
            factor = torch.tensor(factor, dtype=self.dtype).item()
        return factor

    def _fill(self, to: native.Layer, index: int) -> None:
        spec, factor, layer = self._spec, self._spec.residual_multiplier, f"layers.{index}."
        for name in NORMS:
            setattr(to, name, self._norm(layer + name))
        if spec.norm.placement == "once":
            to.post_norm = to.input_norm  # of the same residual stream
        to.q_norm = self._address(layer + "q_norm")
        to.k_norm = self._address(layer + "k_norm")
        parts = self._weights.linears[layer + "qkv"]
        to.qkv_parts = len(parts)
        for part, packed in enumerate(parts):
            to.qkv[part] = packed.structure()
        to.output = self._linear(layer + "output", factor=factor)
        to.q_up = self._linear(layer + "q_up")
        to.k_up, to.v_up = self._by_head(layer + "k_up"), self._by_head(layer + "v_up")
        to.gate_up = self._linear(layer + "gate_up")
        to.down = self._linear(layer + "down", factor=factor)
        self._fill_experts(to, layer)
        to.sinks = self._address(layer + "sinks")
        window = spec.attention.windows[index]
        to.window = window or 0
        to.rotation = 0
        if index in spec.rope.unrotated_layers:
            to.rotation = -1
        elif spec.rope.local_theta and window is not None:
            to.rotation = spec.attention.head_dim // 2  # behind those of the other layers

    def _fill_experts(self, to: native.Layer, layer: str) -> None:
        if self._spec.experts is None or layer + "router" not in self._weights.linears:
            return
        to.router = self._linear(layer + "router")
        to.shared_gate = self._linear(layer + "shared_gate")
        alpha, limit = self._spec.experts.clamp or (0.0, 0.0)
        experts = (native.Expert * self._spec.experts.count)()
        for number, own in enumerate(experts):
            own.gate_up = self._linear(f"{layer}experts.{number}.gate_up")
            own.gate_up.alpha, own.gate_up.limit = alpha, limit
            own.down = self._linear(f"{layer}experts.{number}.down")
        self._held.append(experts)
        to.experts = experts
        to.correction = self._address(layer + "correction")

    def _mixture(self) -> native.Mixture:
        experts = self._spec.experts
        if experts is None:
            return native.Mixture()
        activation = GATED[self._spec.mlp.activation]
        return native.Mixture(
            count=experts.count,
            chosen=experts.chosen,
            inner=experts.inner_size,
            normalised=experts.normalised,
            sigmoid=experts.scores == "sigmoid",
            groups=experts.groups,
            chosen_groups=experts.chosen_groups,
            best_of_group=experts.best_of_group,
            activation=activation if experts.clamp is None else Epilogue.CLAMPED_MUL,
            factor=self._spec.residual_multiplier * experts.factor,
        )

    def _latent(self) -> native.Latent:
        latent = self._spec.attention.latent
        if latent is None:
            return native.Latent()
        return native.Latent(
            latent.rank, latent.plain, latent.values, latent.query_rank or 0, latent.eps
        )

    def _by_head(self, name: str) -> ctypes.Array[native.Linear] | None:
        heads = self._weights.linears.get(name)
        if heads is None:
            return None
        found = (native.Linear * len(heads))(*(one.structure() for one in heads))
        self._held.append(found)
        return found

    def _norm(self, name: str) -> native.Norm:
        return native.Norm(self._address(name), self._address(f"{name}.bias"))

    def _linear(self, name: str, factor: float = 1.0) -> native.Linear:
        """An empty one where there is none of this name."""
        found = self._weights.linears.get(name)
        return native.Linear() if found is None else found[0].structure(factor)

    def _own(
        self, matrix: torch.Tensor, *, gated: bool = False, path: ProductPath | None = None
    ) -> native.Linear:
        """`path` None: the packer chooses."""
        packed = self._packer.pack(Dense(matrix), gated=gated, path=path)
        self._held.append(packed)
        return packed.structure()

    def _address(self, name: str) -> int | None:
        tensor = self._weights.tensors.get(name)
        return None if tensor is None else tensor.data_ptr()


def _whole(rank: int) -> int:
    """The rank, up to whole steps."""
    return -(-rank // STEP) * STEP
