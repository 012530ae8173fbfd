"""Pack a model's weights for the native kernels, if the weight cache does not have the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from rootlace.kernels.arrays import as_array
from rootlace.kernels.native.linear import Packer, parts_packed, why_not
from rootlace.kernels.native.packed import Packed
from rootlace.kernels.reference.layers import dense
from rootlace.kernels.weights import Dense, Quantised, Weight, parts_of
from rootlace.runtime.model.checkpoint.weights import PRODUCTS, LayerWeights, ModelWeights
from rootlace.runtime.model.decoder.native_weights import NORMS, AdaptedLayers, PackedWeights
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.lora import Adapter, LowRank

PARTS = 3
"""Most products of different weight types that make up queries, keys and values."""
STEP = 32
"""Inputs of a product that the tile unit multiplies at a time."""
UNSORTED = ("head", "router", "shared_gate", "experts.")
"""Beginnings of the names of weights whose activations are not reordered."""


@torch.inference_mode()
def pack_weights(
    packer: Packer, spec: ModelSpec, weights: ModelWeights, rotations: Mapping[str, np.ndarray]
) -> PackedWeights:
    """Pack the weights of a model. `rotations`: see `RotaryEmbedding.arrays`. Each layer and each
    expert is read once, in order: a layer from a file is never in memory beside its packed copy.

    Codes without kernels are dequantised: a remark says so.
    """
    packing = _Packing(packer, spec)
    linears: dict[str, tuple[Packed, ...]] = {}
    if weights.head is not None:
        linears["head"] = packing.of("head", weights.head)
    weights.release()
    blocks = weights.embedding_blocks
    # The embedding's rows come from the head if the head keeps the file's codes.
    in_head = weights.head_is_embedding and linears["head"][0].schemes is not None
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
    there = {name: as_array(one) for name, one in tensors.items() if one is not None}
    if in_head:
        blocks = None
    return PackedWeights(linears, there | dict(rotations), blocks, in_head, packing.remarks)


def _products(layer: LayerWeights) -> Iterator[tuple[str, Weight]]:
    for name in PRODUCTS:
        weight = getattr(layer, name)
        if weight is not None and name != "kv_up":
            yield name, weight
    for number, expert in enumerate(layer.experts):
        yield f"experts.{number}.gate_up", expert.gate_up
        yield f"experts.{number}.down", expert.down


def _by_head(spec: ModelSpec, layer: LayerWeights) -> Iterator[tuple[str, Iterable[Weight]]]:
    """Yield the products of latent attention head by head: `k_up` [rank, plain], from queries to
    latents; `v_up` [values, rank], from latents to values."""
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
        """Return a weight with its columns in the model's order."""
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


@torch.inference_mode()
def pack_adapters(
    packer: Packer, spec: ModelSpec, weights: PackedWeights, adapters: Sequence[Adapter]
) -> AdaptedLayers:
    """Pack the adapters' low-rank products for the products of `weights`. Ranks are padded with
    zeros, which add nothing: whole steps of a product are not copied."""

    def packed(index: int, name: str, part: LowRank) -> tuple[Packed, list[Packed]]:
        missing = -len(part.a) % STEP
        a = packer.pack(Dense(torch.nn.functional.pad(part.a, (0, 0, 0, missing))))
        padded = torch.nn.functional.pad(part.b, (0, missing))
        gated = name == "gate_up" and spec.mlp.gated
        parts = padded.split([one.outputs for one in weights.linears[f"layers.{index}.{name}"]])
        return a, [packer.pack(Dense(b), gated=gated) for b in parts]

    return [
        {name: packed(index, name, part) for name, part in layer.items()}
        for adapter in adapters
        for index, layer in enumerate(adapter.layers)
    ]
