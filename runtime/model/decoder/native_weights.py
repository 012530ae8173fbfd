"""Lay out a model's weights for the native kernels. Importing this module imports no torch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rootlace.kernels.native import library as native
from rootlace.kernels.native.packed import ACTIVATIONS, Epilogue, Packed
from rootlace.runtime.model.checkpoint.quantised.blocks import READERS
from rootlace.runtime.model.checkpoint.weights import Blocks
from rootlace.runtime.model.families.spec import ModelSpec

# Packed weights -----------------------------------------------------------------------------------
#
# Hold a model's weights, packed for the native kernels, by name.
#
# Names are those of `LayerWeights`' fields with the layer's number before them: `layers.3.qkv`,
# `layers.3.experts.0.down`, `layers.3.post_norm`, `layers.3.post_norm.bias`.


NORMS = ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm")
"""Norms of the residual stream, by the fields of `LayerWeights`."""


class PackedWeights(msgspec.Struct, frozen=True):
    """Weights of a model, packed for the native kernels. `linears`: weights of products; up to
    `packing.PARTS` for queries, keys and values, one for each head for `k_up` and `v_up`.
    `tensors`: embedding and learned positions in the activations' dtype; norms, sinks and
    corrections in float32; the arrays of `Rotations`. A GGUF file's embedding in blocks is not
    among the `tensors`: rows come from the head if `embedding_in_head`, else from
    `embedding_blocks`. `remarks`: notes for users on the packing. `mapped`: bytes of a mapped file,
    which the system counts as free memory. `damage`: set when the file is found damaged."""

    linears: Mapping[str, tuple[Packed, ...]]
    tensors: Mapping[str, np.ndarray]
    embedding_blocks: Blocks | None = None
    embedding_in_head: bool = False
    remarks: tuple[str, ...] = ()
    mapped: int = 0
    damage: threading.Event = msgspec.field(default_factory=threading.Event)


# Stored rows --------------------------------------------------------------------------------------


class StoredRows:
    """Table of rows of a matrix kept as codes, dequantised when first used. The table takes little
    memory; the whole matrix may take half a gigabyte. Not thread-safe."""

    ROWS = 2048

    def __init__(
        self, read: Callable[[np.ndarray], np.ndarray], count: int, dtype: np.dtype[Any]
    ) -> None:
        """`read` returns the given rows, float32 [n, inputs], of a matrix of `count` rows."""
        self._read = read
        self._place = np.full(count, -1, np.int32)
        self._used = 0
        self.table = np.empty((self.ROWS, read(np.zeros(1, np.int32)).shape[1]), dtype)

    @classmethod
    def of(
        cls, weights: PackedWeights, dtype: np.dtype[Any], library: ctypes.CDLL
    ) -> StoredRows | None:
        """Build the rows of an embedding; None for an embedding stored as numbers."""
        if weights.embedding_in_head:
            (head,) = weights.linears["head"]
            return cls(partial(head.rows, library, dtype), head.outputs, dtype)
        if weights.embedding_blocks is None:
            return None
        kind, data = weights.embedding_blocks
        return cls(lambda rows: READERS[kind](data[rows]).numbers(), len(data), dtype)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows' places in `table`, int32; valid until the next call."""
        found = self._place[rows]
        if len(found) and found.min() < 0:
            missing = _distinct(rows[found < 0])
            if self._used + len(missing) > len(self.table):
                self._place.fill(-1)
                self._used, missing = 0, _distinct(rows)
                if len(missing) > len(self.table):
                    self.table = np.empty((len(missing), self.table.shape[1]), self.table.dtype)
            end = self._used + len(missing)
            self.table[self._used : end] = self._read(missing)
            self._place[missing] = np.arange(self._used, end, dtype=np.int32)
            self._used, found = end, self._place[rows]
        return found


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Return ascending distinct rows. (NumPy's `unique` first imports masked arrays: 12 ms.)"""
    return np.array(sorted(set(rows.tolist())), rows.dtype)


# Native weights -----------------------------------------------------------------------------------


GATED = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
PLAIN = {"relu": Epilogue.RELU, "gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH}
"""Epilogues of an MLP's first product by activation, with a gate and without one."""
ADAPTED = ("qkv", "output", "gate_up", "down", "q_up")
"""Products that an `RlLowRank` is added to, in its order."""

AdaptedLayers = Sequence[Mapping[str, tuple[Packed, Sequence[Packed]]]]
"""Low-rank products of adapters, adapter by adapter and layer by layer: by the product's name a,
and b in the parts of the product's weights."""


class NativeWeights:
    """`RlModel` of a checkpoint, and the memory that `RlModel` points to.

    Products read packed weights. The embedding is read by row: from the checkpoint's mapped file if
    the dtype fits, so that only used rows take memory. Otherwise each step asks `stored_rows` for
    its rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        dtype: np.dtype[Any],
        library: ctypes.CDLL,
        adapted: AdaptedLayers = (),
    ) -> None:
        """`dtype`: of activations."""
        self._spec = spec
        self._weights = weights
        self._held: list[object] = [weights]
        self.dtype = dtype
        self.stored_rows = StoredRows.of(weights, dtype, library)
        attention, count = spec.attention, spec.num_layers
        layers = (native.Layer * count)()
        for index in range(count):
            self._fill(layers[index], index)
        self._held.append(layers)
        activations = GATED if spec.mlp.gated else PLAIN
        self.model = native.Model(
            dtype=ACTIVATIONS[dtype],
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
            adapters=self._low_ranks(adapted),
            adapter_rank=max((a.outputs for one in adapted for a, _ in one.values()), default=0),
        )
        """Cache and rotations are still to be set."""

    def embeddings(self, token_ids: np.ndarray) -> np.ndarray:
        """Return rows of the embedding for token_ids int32 [T], float32 [T, H], without the
        multiplier."""
        table = self._weights.tensors.get("embedding")
        if self.stored_rows is not None:
            token_ids = self.stored_rows.places(token_ids)
            table = self.stored_rows.table
        assert table is not None
        rows: np.ndarray = table[token_ids].astype(np.float32)
        return rows

    def _low_ranks(self, adapted: AdaptedLayers) -> ctypes.Array[native.LowRank] | None:
        if not adapted:
            return None
        found = (native.LowRank * (len(adapted) * len(ADAPTED)))()
        for index, layer in enumerate(adapted):
            assert layer.keys() <= set(ADAPTED), "it would be ignored"
            for at, name in enumerate(ADAPTED):
                if name in layer:
                    to, (a, b) = found[index * len(ADAPTED) + at], layer[name]
                    to.a = a.structure()
                    for part, one in enumerate(b):
                        to.b[part] = one.structure()
        self._held += (found, adapted)
        return found

    def _logits(self) -> int:
        """Return the number of logits of the head; a rank's head has a part of the vocabulary."""
        head = self._weights.linears.get("head")
        return self._spec.head_rows if head is None else head[0].outputs

    def _embedding_factor(self) -> float:
        factor = self._spec.embedding_multiplier
        if self._spec.rounded_multiplier:
            factor = float(np.array(factor, self.dtype))
        return factor

    def _fill(self, to: native.Layer, index: int) -> None:
        spec, factor, layer = self._spec, self._spec.residual_multiplier, f"layers.{index}."
        for name in NORMS:
            setattr(to, name, self._norm(layer + name))
        if spec.norm.placement == "once":
            to.post_norm = to.input_norm  # both parts read the same normed stream
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
            to.rotation = spec.attention.head_dim // 2  # behind the other layers' rotations

    def _fill_experts(self, to: native.Layer, layer: str) -> None:
        if self._spec.experts is None or layer + "router" not in self._weights.linears:
            return
        to.router = self._linear(layer + "router")
        to.shared_gate = self._linear(layer + "shared_gate")
        alpha, limit = self._spec.experts.clamp or (0.0, 0.0)
        experts = (native.Expert * self._spec.experts.count)()
        for number, expert in enumerate(experts):
            expert.gate_up = self._linear(f"{layer}experts.{number}.gate_up")
            expert.gate_up.alpha, expert.gate_up.limit = alpha, limit
            expert.down = self._linear(f"{layer}experts.{number}.down")
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
        """Return the structure of a product; an empty one if there is no weight of this name."""
        found = self._weights.linears.get(name)
        return native.Linear() if found is None else found[0].structure(factor)

    def _address(self, name: str) -> int | None:
        tensor = self._weights.tensors.get(name)
        return None if tensor is None else tensor.ctypes.data
