"""A model as the native kernels read it, packed layer by layer."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch

from rootlace.kernels import Dense, Quantised, Weight
from rootlace.kernels.native import library as native
from rootlace.kernels.native.codes import parts_packed, why_not
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.linear import DTYPES, Arena, Epilogue, PackedLinear
from rootlace.kernels.reference.linear import dense
from rootlace.kernels.weights import CODES, parts_of
from rootlace.runtime.model.adapters.weights import Adapter
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.runtime.model.families.spec import ModelSpec

log = logging.getLogger(__name__)

GATED = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
PLAIN = {"relu": Epilogue.RELU, "gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH}
"""What follows an MLP's first product, by its activation, with a gate and without one."""
KINDS = frozenset({"dense", *CODES})
"""The kinds of weights that the native kernels multiply by."""
ADAPTED = ("qkv", "output", "gate_up", "down")
"""The products that an `RlLowRank` is added to, in its order."""


class NativeWeights:
    """The `RlModel` of a checkpoint, and the memory that it points to.

    Products read packed weights. The embedding is read by row and stays as it is: the checkpoint's
    mapped file where that has the type, of which the rows that are used take memory.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        spec: ModelSpec,
        weights: ModelWeights,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Each layer is asked for once, in order, so that one which is read from a file then need
        not be in memory beside the packed ones.

        Codes that have no kernels become the numbers that they stand for: the log says so."""
        self._library = library
        self._team = team
        self._spec = spec
        self._arena = Arena()
        self._held: list[object] = []
        self._dtype = weights.embedding.dtype
        self._unpacked: dict[str, str] = {}
        head = native.Linear()
        if weights.head is not None:
            head = self._linear(self._in_order(weights.head), factor=spec.logit_multiplier)
        weights.release()
        attention, count = spec.attention, spec.num_layers
        layers = (native.Layer * count)()
        for index, layer in enumerate(weights.layers):
            self._fill(layers[index], layer, index)
        self._held.append(layers)
        activations = GATED if spec.mlp.gated else PLAIN
        self.model = native.Model(
            dtype=DTYPES[self._dtype],
            hidden=spec.hidden_size,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            inner=max(spec.mlp.inner_size, spec.experts.shared_size if spec.experts else 0),
            num_layers=count,
            vocab=spec.head_rows,
            activation=activations[spec.mlp.activation],
            layer_norms=spec.norm.kind == "layer",
            joint_norm=attention.joint_norm,
            parallel=spec.parallel,
            eps=spec.norm.eps,
            scale=attention.scale,
            score_cap=attention.soft_cap,
            logit_cap=spec.logit_soft_cap,
            embedding_factor=self._embedding_factor(),
            embedding=self._address(weights.embedding),
            positions=self._address(weights.positions),
            final_norm=self._norm(weights.final_norm, weights.final_norm_bias),
            mixture=self._mixture(),
            layers=layers,
            head=head,
            adapters=self._adapters(adapters),
            adapter_rank=max((one.largest_rank() for one in adapters), default=0),
        )
        """Cache and rotations are still to be set."""
        for reason, kind in self._unpacked.items():
            log.warning("weights of %s take the memory of dense ones: %s", kind, reason)

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
                    to, part = found[index * len(ADAPTED) + at], layer[name]
                    to.a, to.b = self._linear(Dense(part.a)), self._linear(Dense(part.b))
        self._held.append(found)
        return found

    def _embedding_factor(self) -> float:
        factor = self._spec.embedding_multiplier
        if self._spec.rounded_multiplier:
            factor = torch.tensor(factor, dtype=self._dtype).item()
        return factor

    def _fill(self, to: native.Layer, layer: LayerWeights, index: int) -> None:
        spec, factor = self._spec, self._spec.residual_multiplier
        for name in ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"):
            setattr(to, name, self._norm(*layer.norm(name)))
        if spec.norm.placement == "once":
            to.post_norm = to.input_norm  # of the same residual stream
        to.q_norm = self._address(_float32(layer.q_norm))
        to.k_norm = self._address(_float32(layer.k_norm))
        to.qkv_parts = self._fill_parts(to.qkv, layer.qkv)
        to.output = self._linear(layer.output, factor=factor)
        if layer.gate_up is not None and layer.down is not None:
            to.gate_up = self._linear(layer.gate_up, gated=spec.mlp.gated)
            to.down = self._linear(layer.down, factor=factor)
        self._fill_experts(to, layer)
        to.sinks = self._address(_float32(layer.sinks))
        window = spec.attention.windows[index]
        to.window = window or 0
        to.rotation = 0
        if index in spec.rope.unrotated_layers:
            to.rotation = -1
        elif spec.rope.local_theta and window is not None:
            to.rotation = spec.attention.head_dim // 2  # behind those of the other layers

    def _fill_experts(self, to: native.Layer, layer: LayerWeights) -> None:
        if layer.router is None or self._spec.experts is None:
            return
        to.router = self._linear(self._in_order(layer.router))
        if layer.shared_gate is not None:
            to.shared_gate = self._linear(self._in_order(layer.shared_gate))
        alpha, limit = self._spec.experts.clamp or (0.0, 0.0)
        experts = (native.Expert * len(layer.experts))()
        for own, expert in zip(experts, layer.experts, strict=True):
            own.gate_up = self._linear(self._in_order(expert.gate_up), gated=True)
            own.gate_up.alpha, own.gate_up.limit = alpha, limit
            own.down = self._linear(self._in_order(expert.down))
        self._held.append(experts)
        to.experts = experts

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
            activation=activation if experts.clamp is None else Epilogue.CLAMPED_MUL,
            factor=self._spec.residual_multiplier,
        )

    def _norm(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> native.Norm:
        return native.Norm(self._address(_float32(weight)), self._address(_float32(bias)))

    def _in_order(self, weight: Weight) -> Weight:
        """A weight with its columns in the model's order, where activations cannot be put into
        another one: of the head, and of experts."""
        if all(isinstance(part, Dense) or part.order is None for part in parts_of(weight)):
            return weight
        reason = "the native kernels cannot sort the columns of a head or of experts"
        self._unpacked.setdefault(reason, weight.kind)
        return dense(weight, self._dtype)

    def _fill_parts(self, to: ctypes.Array[native.Linear], weight: Weight) -> int:
        parts = parts_of(weight)
        if len(parts) > len(to):
            parts = (dense(weight, self._dtype),)
        for index, part in enumerate(parts):
            to[index] = self._linear(part)
        return len(parts)

    def _linear(self, weight: Weight, *, gated: bool = False, factor: float = 1.0) -> native.Linear:
        if any(isinstance(part, Quantised) for part in parts_of(weight)):
            reason = why_not(parts_packed(weight, gated), gated)
            if reason is not None:
                self._unpacked.setdefault(reason, weight.kind)
                weight = dense(weight, self._dtype)
        packed = PackedLinear(
            self._library,
            self._team,
            weight,
            self._dtype,
            gated=gated,
            factor=factor,
            arena=self._arena,
        )
        self._held.append(packed)
        return packed.structure

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
