"""A checkpoint opened: its files, and whether they have what the model's decoder needs.

Imports no torch: packed weights of an earlier start need none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.quantised.layouts import Expected, Storage
from rootlace.runtime.model.checkpoint.weights import Part, layer_parts
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames

Progress = Callable[[str, float], None]
"""Is told what is being read, and how much of all there is to read has been."""

AT_ONCE = 4096
"""Rows that are compared at a time: NumPy has a byte for each number of them."""
KV_SCALES = {
    "k": ("self_attn.k_proj.k_scale", "self_attn.k_scale", "self_attn.attn.k_scale"),
    "v": ("self_attn.v_proj.v_scale", "self_attn.v_scale", "self_attn.attn.v_scale"),
}
"""Names of a layer's scales of an fp8 KV cache."""
KV_SCALE = "self_attn.kv_scale"
"""The name in old ones: one scale for keys and values."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that has the tensors which are `expected` of a model, by their names; its spec,
    with the checkpoint's names; the modules of its embedding and head, which are one where they
    are tied."""

    spec: ModelSpec
    checkpoint: Checkpoint
    storage: Storage
    embedding: str
    head: str
    expected: Mapping[str, Expected]


def open_checkpoint(config: ModelConfig, *, compare_ends: bool = True) -> OpenedCheckpoint:
    """Map the files of a model, and compare what is in them with what its decoder needs. Raises
    `UnsupportedModel`. `compare_ends` False: do not read the embedding and the head to find out
    whether they are tied, but believe the configuration."""
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    spec = _as_named(config.spec, checkpoint)
    storage = Storage(config.path, checkpoint.types, config.quantisation)
    embedding, head = _ends(spec, checkpoint, storage, compare=compare_ends)
    expected = _expected(spec, storage, embedding, head)
    checkpoint.expect(expected, _ignored(spec, storage))
    return OpenedCheckpoint(spec, checkpoint, storage, embedding, head, expected)


def checkpoint_dtype(config: ModelConfig) -> np.dtype[Any]:
    """The type the checkpoint's weights are stored in: that of the embedding, or of any, where
    transformers runs the model."""
    if config.checkpoint_dtype:  # which may be a name that only torch has
        with suppress(TypeError):
            return np.dtype(config.checkpoint_dtype.removeprefix("torch."))
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    if config.spec.transformers is not None:
        return checkpoint.array(next(iter(checkpoint.types))).dtype
    spec = _as_named(config.spec, checkpoint)
    storage = Storage(config.path, checkpoint.types, config.quantisation)
    embedding, _ = _ends(spec, checkpoint, storage, compare=False)
    return checkpoint.array(f"{embedding}.weight").dtype


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of the KV cache."""
    return name.endswith((*KV_SCALES["k"], *KV_SCALES["v"], KV_SCALE))


def _as_named(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The spec with those of its names that the checkpoint has most modules of."""

    def found(names: WeightNames) -> int:
        ends = (names.embedding, names.final_norm, names.head)
        return sum(f"{module}.weight" in checkpoint.types for module in ends)

    others = spec.names.others
    best = max(others, key=found, default=spec.names)
    return spec if found(best) <= found(spec.names) else replace(spec, names=best)


def _ends(
    spec: ModelSpec, checkpoint: Checkpoint, storage: Storage, *, compare: bool
) -> tuple[str, str]:
    """The modules of the embedding and of the head, which are one where they are tied or there is
    no head.

    Tied weights may be stored under either name. Where both are there and differ they are not tied,
    whatever the configuration says; transformers takes them so too. They are read and compared only
    if `compare` says so: otherwise the configuration is believed.
    """
    embedding, head = spec.names.embedding, spec.names.head
    if spec.labels == 0:
        return embedding, embedding
    if not spec.tied_embeddings or storage.layout(head) is not None:
        return embedding, head
    if f"{head}.weight" not in checkpoint.types:
        return embedding, embedding
    if f"{embedding}.weight" not in checkpoint.types:
        return head, head
    if not compare:
        return embedding, embedding
    one, other = (checkpoint.array(f"{module}.weight") for module in (embedding, head))
    if (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        np.array_equal(one[at : at + AT_ONCE], other[at : at + AT_ONCE])
        for at in range(0, len(one), AT_ONCE)
    ):
        return embedding, embedding
    log.warning(
        "%s.weight and %s.weight differ: they are not tied, though config.json says so",
        embedding,
        head,
    )
    return embedding, head


def _expected(spec: ModelSpec, storage: Storage, embedding: str, head: str) -> dict[str, Expected]:
    """Every tensor of the architecture, by its name in the checkpoint."""
    ends = (spec.vocab_size, spec.hidden_size)
    found = {f"{spec.names.final_norm}.weight": Expected(((spec.hidden_size,),))}
    if spec.norm.bias:
        found[f"{spec.names.final_norm}.bias"] = Expected(((spec.hidden_size,),))
    positions, table = spec.learned_positions + spec.skipped_positions, spec.names.positions
    if positions:
        found[f"{table}.weight"] = Expected(((positions, spec.hidden_size),))
    rows = spec.vocab_size if head == embedding else spec.head_rows
    found |= storage.possible(head, rows, spec.hidden_size)
    found |= storage.needed(head, rows, spec.hidden_size)
    found |= storage.needed(embedding, *ends)
    for index in range(spec.num_layers):
        for part in layer_parts(spec, index).values():
            found |= _expected_of(part, storage)
            found |= {name: Expected((shape,)) for name, shape in part.biases().items()}
    return found


def _expected_of(part: Part, storage: Storage) -> dict[str, Expected]:
    """The tensors of a part's weight."""
    quantised = any(storage.layout(module) is not None for module in part.modules)
    if part.columns is None or (part.transposed and not quantised):
        return {name: Expected((shape,)) for name, shape in part.weights().items()}
    if part.transposed and part.count is None:
        raise storage.refusal(f"{part.modules[0]} is quantised and has a row for each input")
    found: dict[str, Expected] = {}
    for module, rows in zip(part.modules, part.rows, strict=True):
        needed = storage.needed(module, rows, part.columns)
        if part.count is None:
            needed |= storage.possible(module, rows, part.columns)
        for name, what in needed.items():
            shapes = tuple(map(part.shape_in_stack, what.shapes))
            found[name] = Expected(shapes, what.types)
    return found


def _ignored(spec: ModelSpec, storage: Storage) -> Callable[[str], bool]:
    """Names that need not be there: what old checkpoints carry, a head that is the embedding, other
    models, and scales of a cache or of activations."""
    buffers = (".rotary_emb.inv_freq", *spec.names.buffers)
    count = spec.num_layers
    further = tuple(
        spec.names.layer.format(count + index) for index in range(spec.names.further_layers)
    )

    apart = (*further, *spec.names.apart)

    def ignored(name: str) -> bool:
        if name == f"{spec.names.head}.weight":
            return spec.tied_embeddings or spec.labels == 0
        if name.endswith(buffers) or is_kv_scale(name) or name.startswith(apart):
            return True
        return storage.passed_over(name)

    return ignored
