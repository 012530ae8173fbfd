"""Weights from a checkpoint, joined and converted as they are read.

Layers are read one by one, so that weights which are packed are never in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rootlace.kernels import Dense, Quantised, Scheme, Weight
from rootlace.kernels.reference.layers import quantise
from rootlace.kernels.weights import rows_of
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.quantised.layouts import FLOATS, Expected
from rootlace.runtime.model.checkpoint.quantised.storage import Storage
from rootlace.runtime.model.checkpoint.reader import Reader
from rootlace.runtime.model.checkpoint.weights import (
    LayerWeights,
    ModelWeights,
    OnDemand,
    Part,
    layer_parts,
)
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames
from rootlace.runtime.model.parallel.shard import Shard
from rootlace.wire.errors import InvalidRequest

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
    shard: Shard | None = None,
) -> ModelWeights:
    """The weights in `dtype`; layers are read whenever they are asked for (see `resident`). With a
    `shard`, of layers and head what this rank has.

    What is one tensor in the checkpoint too, of this type, and needed in main memory, is the mapped
    file itself. Quantised weights stay quantised. Strict: raises `UnsupportedModel` naming the file
    and the weights that are missing, are not part of the architecture, or have another shape or
    type. `progress(what, fraction)` is called per layer.
    """
    opened = open_checkpoint(config)
    spec, checkpoint, storage = opened.spec, opened.checkpoint, opened.storage
    embedding_module, head_module = opened.embedding, opened.head
    _log(opened)
    report = progress or _silent
    reader = Reader(checkpoint, storage, dtype, device, shard)
    report("embedding", 0.0)
    ends = (spec.vocab_size, spec.hidden_size)
    quantised = embedding_stored = None
    if storage.layout(embedding_module) is None:
        embedding_stored = f"{embedding_module}.weight"
        embedding = reader.mapped(embedding_stored)
        if not reader.is_mapped(embedding_stored):
            embedding_stored = None
    else:
        # Steps look its rows up as they are, also where a tied head multiplies by the codes.
        quantised = reader.module(embedding_module, *ends, biased=False)
        embedding = reader.dense(quantised)
    final_norm = reader.norm([f"{spec.names.final_norm}.weight"], spec.norm.offset)
    final_norm_bias = None
    if spec.norm.bias:
        final_norm_bias = reader.read([f"{spec.names.final_norm}.bias"])
    positions = None
    if spec.learned_positions:
        positions = reader.read([f"{spec.names.positions}.weight"])[spec.skipped_positions :]
    head: Dense | Quantised | None
    if spec.labels == 0:
        head = None
    elif head_module == embedding_module:
        head = quantised or Dense(embedding)
    elif storage.layout(head_module) is None:
        head = Dense(reader.mapped(f"{head_module}.weight"))
    else:
        head = reader.module(head_module, spec.head_rows, spec.hidden_size, biased=False)
    if shard is not None and spec.labels is None and head is not None:
        head = _own_head(head, shard.vocabulary)

    def release() -> None:
        # The tensors of a quantised head were let go of when they had been read.
        if storage.layout(head_module) is None:
            checkpoint.release(f"{head_module}.weight")

    count = spec.num_layers

    def layer(index: int) -> LayerWeights:
        found = reader.layer(spec, index)
        report(f"layer {index + 1} of {count}", (index + 1) / count)
        return found

    return ModelWeights(
        embedding=embedding,
        layers=OnDemand(count, layer),
        final_norm=final_norm,
        head=head,
        final_norm_bias=final_norm_bias,
        positions=positions,
        embedding_stored=embedding_stored,
        release=release,
    )


def _own_head(head: Dense | Quantised, rows: range) -> Dense | Quantised:
    """The part of a head that makes the logits of these tokens; of what is tied to the embedding,
    or mapped, a view."""
    if isinstance(head, Dense):
        return Dense(head.matrix[rows.start : rows.stop])
    return rows_of(head, torch.arange(rows.start, rows.stop, device=head.values.device))


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


def checkpoint_dtype(config: ModelConfig) -> torch.dtype:
    """The type the checkpoint's weights are stored in: that of the embedding, or of any, where
    transformers runs the model."""
    named = getattr(torch, (config.checkpoint_dtype or "").removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    if config.spec.foreign is not None:
        return checkpoint.tensor(next(iter(checkpoint.types))).dtype
    spec = _as_named(config.spec, checkpoint)
    storage = Storage(config.path, checkpoint.types, config.quantisation)
    embedding, _ = _ends(spec, checkpoint, storage, compare=False)
    return checkpoint.tensor(f"{embedding}.weight").dtype


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
    one, other = (checkpoint.tensor(f"{module}.weight") for module in (embedding, head))
    if one.dtype == other.dtype and torch.equal(one, other):
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


def _log(opened: OpenedCheckpoint) -> None:
    storage, found = opened.storage, opened.storage.quantisation
    if found is None:
        return
    if all(what.types == FLOATS for what in opened.expected.values()):
        log.warning(
            "%s: quantization_config says %s, but all weights are dense",
            storage.folder,
            found.method,
        )
        return
    log.info("%s: quantised weights (%s)", storage.folder, found.method)
    for remark in found.remarks:
        log.info("%s: %s", storage.folder, remark)


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


def _silent(what: str, fraction: float) -> None:
    pass


# Rounding -----------------------------------------------------------------------------------------
#
# Weights rounded to few bits while they are read (`--quantize`), layer by layer.


GROUPS = (128, 32)
"""Inputs that share a scale in four bits: the first of these that divides their number."""
HEAD = Scheme("int8")
"""Of the head, whatever the layers have: every token's probability hangs on it."""


def rounded(weights_of: LoadWeights, codes: Literal["int8", "int4"]) -> LoadWeights:
    """Gets the weights that `weights_of` gets, the products of all layers rounded to `codes` and
    the head to int8, unless it scores labels. Raises `InvalidRequest` for weights that are
    quantised already."""

    def load(
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> ModelWeights:
        if config.quantisation is not None:
            raise _already(config.quantisation.method)
        weights = weights_of(config, dtype, device, progress)
        layers = weights.layers
        return replace(
            weights,
            layers=OnDemand(
                len(layers), lambda at: layers[at].with_products(lambda one: _rounded(one, codes))
            ),
            head=weights.head if config.spec.labels is not None else _rounded_head(weights),
        )

    return load


def _rounded_head(weights: ModelWeights) -> Weight:
    assert weights.head is not None
    return _round(weights.head, HEAD)


def _rounded(weight: Weight, codes: Literal["int8", "int4"]) -> Weight:
    if codes == "int8":
        return _round(weight, Scheme("int8"))
    inputs = weight.shape[1]
    group = next((size for size in GROUPS if inputs % size == 0), None)
    # Fewer bits would tell little of a number in a group of any size.
    return _round(weight, Scheme("int4", group) if group else Scheme("int8"))


def _round(weight: Weight, scheme: Scheme) -> Weight:
    if not isinstance(weight, Dense):
        raise _already(weight.kind)
    # Where groups are small their scales weigh, and half as many bits do.
    scales = torch.float32 if scheme.group is None else torch.bfloat16
    return quantise(weight.matrix, scheme, weight.bias, scales)


def _already(how: str) -> InvalidRequest:
    return InvalidRequest(f"quantize: the model's weights are quantised already ({how})")
