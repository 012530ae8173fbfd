"""A model as the native kernels read it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from rootlace.kernels import Dense
from rootlace.kernels.native import library as native
from rootlace.kernels.native.linear import DTYPES, Epilogue, Packed, Packer, ProductPath
from rootlace.kernels.weights import CODES
from rootlace.runtime.model.adapters.weights import Adapter, LowRank
from rootlace.runtime.model.decoder.packed_weights import NORMS, PackedWeights
from rootlace.runtime.model.families.spec import ModelSpec

GATED = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
PLAIN = {"relu": Epilogue.RELU, "gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH}
"""What follows an MLP's first product, by its activation, with a gate and without one."""
KINDS = frozenset({"dense", *CODES})
"""The kinds of weights that the native kernels multiply by."""
STEP = 32
"""So many inputs of a product are multiplied at a time where there are tiles."""
ADAPTED = ("qkv", "output", "gate_up", "down", "q_up")
"""The products that an `RlLowRank` is added to, in its order."""


class NativeWeights:
    """The `RlModel` of a checkpoint, and the memory that it points to.

    Products read packed weights. The embedding is read by row and stays as it is: the checkpoint's
    mapped file where that has the type, of which the rows that are used take memory.
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
        """What all of them do, adapter by adapter and layer by layer."""
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
