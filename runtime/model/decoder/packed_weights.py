"""A model's weights packed for the native kernels, each by its name.

Names are those of `LayerWeights`' fields with the layer's number before them: `layers.3.qkv`,
`layers.3.experts.0.down`, `layers.3.post_norm`, `layers.3.post_norm.bias`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from rootlace.kernels import Dense, Quantised, Weight
from rootlace.kernels.native.codes import parts_packed, why_not
from rootlace.kernels.native.linear import Packed, Packer
from rootlace.kernels.reference.linear import dense
from rootlace.kernels.weights import parts_of
from rootlace.runtime.model.checkpoint.weights import PRODUCTS, LayerWeights, ModelWeights
from rootlace.runtime.model.families.spec import ModelSpec

PARTS = 3
"""So many products of unlike weights make up queries, keys and values."""
NORMS = ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm")
"""Those of the residual stream, by the fields of `LayerWeights`."""
UNSORTED = ("head", "router", "shared_gate", "experts.")
"""Names, or how they begin, of weights whose activations are not put into another order."""


@dataclass(frozen=True)
class PackedWeights:
    """`linears`: the weights of products, of queries, keys and values up to `PARTS`, of latent
    attention's `k_up` and `v_up` one for each head. `tensors`: the embedding and learned positions
    in the activations' type; norms, sinks and corrections in float32.
    `remarks`: what users should know of how they are packed. `mapped`: bytes that are a file's, of
    which the system says that they are free. `damage`: set when that file turns out to be
    damaged."""

    linears: Mapping[str, tuple[Packed, ...]]
    tensors: Mapping[str, torch.Tensor]
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
    tensors = {"embedding": weights.embedding, "positions": weights.positions}
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
    return PackedWeights(linears, there, packing.remarks)


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
