"""Weights from a checkpoint, joined and converted as they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rootlace.kernels import Dense
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint, Shape
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights, layer_parts
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

log = logging.getLogger(__name__)


def load_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ModelWeights:
    """Read every weight once, memory-mapped, straight into its (joined) place in `dtype`.

    Strict: raises `UnsupportedModel` naming the file and the weights that are missing, are not
    part of the architecture, or have another shape or type. `progress(what, fraction)` is called
    per layer.
    """
    spec = config.spec
    with Checkpoint(config.path) as checkpoint:
        embedding_name, head_name = _ends(spec, checkpoint)
        checkpoint.expect(_expected_shapes(spec, embedding_name, head_name), _ignored(spec))
        report = progress or _silent
        reader = _Reader(checkpoint, dtype, device)
        report("embedding", 0.0)
        embedding = reader.read([embedding_name])
        layers = []
        for index in range(spec.num_layers):
            layers.append(reader.layer(spec, index))
            report(f"layer {index + 1} of {spec.num_layers}", (index + 1) / spec.num_layers)
        tied = head_name == embedding_name
        return ModelWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=reader.read([f"{spec.names.final_norm}.weight"]),
            head=Dense(embedding if tied else reader.read([head_name])),
        )


def checkpoint_dtype(config: ModelConfig) -> torch.dtype:
    """The type the checkpoint's weights are stored in (that of the embedding)."""
    named = getattr(torch, (config.checkpoint_dtype or "").removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    with Checkpoint(config.path) as checkpoint:
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


class _Reader:
    """Places weights: converts type and device, joins what is fused."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def read(self, names: Iterable[str]) -> torch.Tensor:
        """The named weights, stacked along their rows, in memory of their own."""
        parts = [self._checkpoint.tensor(name) for name in names]
        rows = sum(len(part) for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        start = 0
        for part in parts:
            whole[start : start + len(part)].copy_(part)
            start += len(part)
        return whole

    def layer(self, spec: ModelSpec, index: int) -> LayerWeights:
        found: dict[str, Any] = {}
        for name, part in layer_parts(spec, index).items():
            weight = self.read(part.weights())
            bias = self.read(part.biases()) if part.bias else None
            found[name] = weight if part.columns is None else Dense(weight, bias)
        return LayerWeights(**found)


def _ignored(spec: ModelSpec) -> Callable[[str], bool]:
    """Names that need not be there: what old checkpoints carry, a head that is the embedding, and
    scales of a cache."""

    def ignored(name: str) -> bool:
        if name == f"{spec.names.head}.weight":
            return spec.tied_embeddings
        return name.endswith(".rotary_emb.inv_freq") or is_kv_scale(name)

    return ignored


def _silent(what: str, fraction: float) -> None:
    pass
