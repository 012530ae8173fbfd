"""Weights from a checkpoint, joined and converted as they are read.

Layers are read one by one, so that weights which are packed are never in memory twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch

from rootlace.kernels import Dense
from rootlace.kernels.native.memory import mapped
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint, Shape
from rootlace.runtime.model.checkpoint.weights import (
    LayerWeights,
    ModelWeights,
    layer_parts,
    row_order,
)
from rootlace.runtime.model.families.spec import ModelSpec

Progress = Callable[[str, float], None]
LoadWeights = Callable[[ModelConfig, torch.dtype, torch.device, Progress | None], ModelWeights]
"""Gets a model's weights: `load_weights`, or for measurements a function that makes them up."""

KV_SCALES = {
    "k": ("self_attn.k_proj.k_scale", "self_attn.k_scale", "self_attn.attn.k_scale"),
    "v": ("self_attn.v_proj.v_scale", "self_attn.v_scale", "self_attn.attn.v_scale"),
}
"""What checkpoints call a layer's scales of an fp8 KV cache."""
KV_SCALE = "self_attn.kv_scale"
"""The name in old ones: one scale for keys and values."""

OWN_MAPPING = 4 << 20

log = logging.getLogger(__name__)


def load_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ModelWeights:
    """The weights in `dtype`; layers are read whenever they are asked for (see `resident`).

    What is one tensor in the checkpoint too, of this type, and needed in main memory, is the mapped
    file itself. Strict: raises `UnsupportedModel` naming the file and the weights that are missing,
    are not part of the architecture, or have another shape or type. `progress(what, fraction)` is
    called per layer.
    """
    spec = config.spec
    checkpoint = Checkpoint(config.path)
    embedding_name, head_name = _ends(spec, checkpoint)
    checkpoint.expect(_expected_shapes(spec, embedding_name, head_name), _ignored(spec))
    report = progress or _silent
    reader = _Reader(checkpoint, dtype, device)
    report("embedding", 0.0)
    embedding = reader.mapped(embedding_name)
    tied = head_name == embedding_name
    final_norm = reader.read([f"{spec.names.final_norm}.weight"])
    if spec.norm.offset:
        final_norm.add_(spec.norm.offset)
    return ModelWeights(
        embedding=embedding,
        layers=_StoredLayers(spec, reader, report),
        final_norm=final_norm,
        head=Dense(embedding if tied else reader.mapped(head_name)),
        release=lambda: checkpoint.release(head_name),
    )


def checkpoint_dtype(config: ModelConfig) -> torch.dtype:
    """The type the checkpoint's weights are stored in (that of the embedding)."""
    named = getattr(torch, (config.checkpoint_dtype or "").removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    checkpoint = Checkpoint(config.path)
    return checkpoint.tensor(_ends(config.spec, checkpoint)[0]).dtype


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of the KV cache."""
    return name.endswith((*KV_SCALES["k"], *KV_SCALES["v"], KV_SCALE))


def _ends(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, str]:
    """The tensors of the embedding and of the head, which are one where they are tied.

    Tied weights may be stored under either name. Where both are there and differ they are not tied,
    whatever the configuration says; transformers takes them so too.
    """
    embedding, head = f"{spec.names.embedding}.weight", f"{spec.names.head}.weight"
    if not spec.tied_embeddings:
        return embedding, head
    if head not in checkpoint.names():
        return embedding, embedding
    if embedding not in checkpoint.names():
        return head, head
    one, other = checkpoint.tensor(embedding), checkpoint.tensor(head)
    if one.dtype == other.dtype and torch.equal(one, other):
        return embedding, embedding
    log.warning("%s and %s differ: they are not tied, though config.json says so", embedding, head)
    return embedding, head


def _expected_shapes(spec: ModelSpec, embedding: str, head: str) -> dict[str, Shape]:
    """Every weight of the architecture, by its name in the checkpoint."""
    shapes: dict[str, Shape] = {
        embedding: (spec.vocab_size, spec.hidden_size),
        head: (spec.vocab_size, spec.hidden_size),
        f"{spec.names.final_norm}.weight": (spec.hidden_size,),
    }
    for index in range(spec.num_layers):
        for part in layer_parts(spec, index).values():
            shapes |= part.weights() | part.biases()
    return shapes


class _StoredLayers(Sequence[LayerWeights]):
    """The layers of a checkpoint, read whenever they are asked for."""

    def __init__(self, spec: ModelSpec, reader: _Reader, report: Progress) -> None:
        self._spec = spec
        self._reader = reader
        self._report = report

    def __len__(self) -> int:
        return self._spec.num_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        count = len(self)
        if not -count <= index < count:
            raise IndexError(index)
        layer = self._reader.layer(self._spec, index % count)
        self._report(f"layer {index + 1} of {count}", (index + 1) / count)
        return layer


class _Reader:
    """Places weights: converts type and device, joins what is fused."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def mapped(self, name: str) -> torch.Tensor:
        """The named weight, as the file has it if that will do."""
        found = self._checkpoint.tensor(name)
        if found.dtype == self._dtype and found.device == self._device:
            return found
        return self.read([name])

    def read(self, names: Iterable[str]) -> torch.Tensor:
        """The named weights, stacked along their rows, in memory of their own."""
        parts = {name: self._checkpoint.tensor(name) for name in names}
        rows = sum(len(part) for part in parts.values())
        shape = (rows, *next(iter(parts.values())).shape[1:])
        whole = _empty(shape, self._dtype, self._device)
        start = 0
        for name, part in parts.items():
            whole[start : start + len(part)].copy_(part)
            start += len(part)
            self._checkpoint.release(name)
        return whole

    def layer(self, spec: ModelSpec, index: int) -> LayerWeights:
        found: dict[str, Any] = {}
        for name, part in layer_parts(spec, index).items():
            order = row_order(spec, name)
            weight = _ordered(self.read(part.weights()), order)
            bias = _ordered(self.read(part.biases()), order) if part.bias else None
            found[name] = weight if part.columns is None else Dense(weight, bias)
            if part.columns is None and spec.norm.offset:
                weight.add_(spec.norm.offset)
        return LayerWeights(**found)


def _ignored(spec: ModelSpec) -> Callable[[str], bool]:
    """Names that need not be there: what old checkpoints carry, a head that is the embedding, and
    scales of a cache."""

    def ignored(name: str) -> bool:
        if name == f"{spec.names.head}.weight":
            return spec.tied_embeddings
        return name.endswith(".rotary_emb.inv_freq") or is_kv_scale(name)

    return ignored


def _empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a weight. A large one is a mapping of its own, which goes back to the system at
    once when the weight is dropped: the allocator would keep much of it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device=device)
    return mapped(size).view(dtype).view(shape)


def _ordered(rows: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    if order is None:
        return rows
    ordered = _empty(tuple(rows.shape), rows.dtype, rows.device)
    return torch.index_select(rows, 0, torch.tensor(order, device=rows.device), out=ordered)


def _silent(what: str, fraction: float) -> None:
    pass
