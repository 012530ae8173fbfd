"""Estimate the memory of weights, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import OpenedCheckpoint, open_checkpoint
from rootlace.runtime.model.checkpoint.quantised.layouts import (
    COLUMN_GROUPS,
    FLOATS,
    Expected,
    Quantisation,
)
from rootlace.runtime.model.checkpoint.source import has_weights
from rootlace.runtime.model.checkpoint.weights import DENSE, EXACT, Part, layer_parts
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.gguf.file import Ggml


def weight_bytes(
    config: ModelConfig,
    dtype: np.dtype[Any],
    quantize: Literal["none", "int8", "int4"],
    *,
    head_apart: bool,
) -> int:
    """Estimate the memory of all weights in bytes: floats in `dtype`, rounded as `--quantize` says.
    `head_apart`: count as for native kernels. A tied head then has memory of its own, and quantised
    experts and heads with reordered columns are dense."""
    if config.spec.transformers is not None:
        return config.spec.transformers.numbers * dtype.itemsize
    if config.quantisation is not None and has_weights(config.path, config.allow_pickle):
        return _stored_bytes(config, dtype.itemsize, head_apart=head_apart)
    if config.quantisation is None and quantize != "none":
        return rounded_bytes(config.spec, dtype.itemsize, quantize)
    spec, quantisation = config.spec, config.quantisation
    return foreseen_bytes(spec, dtype.itemsize, quantisation, head_apart=head_apart)


def foreseen_bytes(
    spec: ModelSpec, element: int, quantisation: Quantisation | None = None, *, head_apart: bool
) -> int:
    """Estimate the bytes of weights without reading a file, `element` bytes for each float. With
    `quantisation` all modules count as quantised but embedding and head. See `weight_bytes`."""
    floats = _end_rows(spec, head_apart) * spec.hidden_size
    total = (floats + norm_numbers(spec) + position_numbers(spec)) * element
    for name, part in _parts(spec):
        if quantisation is None or part.columns is None or name in DENSE:
            shapes = (part.weights() | part.biases()).values()
            total += sum(map(math.prod, shapes)) * element
            continue
        found = [Expected((shape,)) for shape in part.biases().values()]
        for module, rows in zip(part.modules, part.rows, strict=True):
            layouts = quantisation.layouts(module)
            dense = {"": Expected(((rows, part.columns),))}
            needed = layouts[0].needed(rows, part.columns) if layouts else dense
            found += [*needed.values()] * (part.count or 1)
        total += sum(what.num_bytes(element) for what in found)
    return total


def _end_rows(spec: ModelSpec, head_apart: bool) -> int:
    """Count the rows of embedding and head together; see `weight_bytes`."""
    return spec.vocab_size + (0 if spec.tied_embeddings and not head_apart else spec.head_rows)


def rounded_bytes(spec: ModelSpec, element: int, codes: Literal["int8", "int4"]) -> int:
    """Estimate the bytes of weights rounded to `codes`: the layers' products in `codes`, head and
    values in int8, the rest in `element` bytes. 32 weights share a scale and an offset of two bytes
    each, except the head's beside int4."""
    products = rounded_numbers(spec)
    others = layer_numbers(spec) - products + norm_numbers(spec) + position_numbers(spec)
    others += spec.vocab_size * spec.hidden_size
    head = spec.head_rows * spec.hidden_size
    if codes == "int8":
        return others * element + (products + head) // 8 * 9
    attention = spec.attention
    values = attention.num_kv_heads * attention.head_dim * spec.hidden_size * spec.num_layers
    in_int8 = 0 if attention.latent else values
    return others * element + products // 8 * 5 + in_int8 // 8 * 4 + head


def layer_numbers(spec: ModelSpec) -> int:
    """Count the numbers of all layers: products, their biases, norms."""
    if spec.transformers is not None:
        return product_numbers(spec)
    return sum(
        math.prod(shape)
        for _, part in _parts(spec)
        for shape in (part.weights() | part.biases()).values()
    )


def product_numbers(spec: ModelSpec) -> int:
    """Count the weights of the layers' products; where transformers runs them, all weights."""
    if spec.transformers is not None:
        return spec.transformers.numbers - _end_rows(spec, False) * spec.hidden_size
    return sum(part.numbers for _, part in _parts(spec))


def rounded_numbers(spec: ModelSpec) -> int:
    """Count the weights that `--quantize` rounds."""
    return sum(part.numbers for name, part in _parts(spec) if name not in EXACT)


def expert_numbers(spec: ModelSpec) -> int:
    """Count the weights of all experts, of which each token uses a few."""
    if spec.experts is None:
        return 0
    experts = spec.experts
    each = 3 * spec.hidden_size * experts.inner_size
    return len(experts.layers) * experts.count * each


def norm_numbers(spec: ModelSpec) -> int:
    """Count the numbers of the final norm."""
    return spec.hidden_size * (2 if spec.norm.bias else 1)


def position_numbers(spec: ModelSpec) -> int:
    """Count the numbers of the table of learned positions; a step reads a few rows."""
    return (spec.learned_positions + spec.skipped_positions) * spec.hidden_size


def _parts(spec: ModelSpec) -> Iterator[tuple[str, Part]]:
    for index in range(spec.num_layers):
        yield from layer_parts(spec, index).items()


def _stored_bytes(config: ModelConfig, element: int, *, head_apart: bool) -> int:
    """Estimate the bytes of a quantised checkpoint's weights, `element` bytes for each float. See
    `weight_bytes`."""
    opened = open_checkpoint(config, compare_ends=False)
    names, total = dict(opened.expected), 0
    ends = (opened.spec.vocab_size, opened.spec.hidden_size)
    tied = opened.embedding == opened.head
    embedding_quantised = opened.storage.layout(opened.embedding) is not None
    if embedding_quantised and not tied:
        # The embedding's codes are dropped once dequantised.
        for name in opened.storage.needed(opened.embedding, *ends):
            del names[name]
    # Native kernels look rows up in a GGUF file's blocks.
    looked_up = head_apart and isinstance(opened.storage.layout(opened.embedding), Ggml)
    apart = tied and head_apart and opened.spec.labels is None
    if not looked_up and (embedding_quantised or apart):
        total += math.prod(ends) * element
    for module, rows, columns in _made_dense(opened, native=head_apart):
        for name in opened.storage.needed(module, rows, columns):
            del names[name]
        total += rows * columns * element
    for name, what in names.items():
        itemsize = element if what.types == FLOATS else None
        total += opened.checkpoint.num_bytes(name, itemsize)
    return total


def _made_dense(opened: OpenedCheckpoint, *, native: bool) -> Iterator[tuple[str, int, int]]:
    """List the quantised modules that become dense, with rows and columns: modules of `DENSE`, and
    modules with reordered columns in places where native kernels sort no activations."""
    spec = opened.spec
    if native and _sorted(opened, opened.head):
        yield opened.head, spec.head_rows, spec.hidden_size
    for name, part in _parts(spec):
        unsorted = native and name.startswith(("experts.", "router", "shared_gate"))
        if part.columns is None or not (unsorted or name in DENSE):
            continue
        for module, rows in zip(part.modules, part.rows, strict=True):
            quantised = opened.storage.layout(module) is not None
            if quantised and (name in DENSE or _sorted(opened, module)):
                yield module, rows * (part.count or 1), part.columns


def _sorted(opened: OpenedCheckpoint, module: str) -> bool:
    """Tell whether columns are sorted by their groups as the module is read."""
    for name in (module + ending for ending in COLUMN_GROUPS):
        if name in opened.expected:
            groups = opened.checkpoint.array(name, opened.expected[name].types)
            return bool((groups[1:] < groups[:-1]).any())
    return False
