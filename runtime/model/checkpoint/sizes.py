"""The memory that the weights of quantised checkpoints take."""

from __future__ import annotations

import torch

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.expected import FLOATS, Expected
from rootlace.runtime.model.checkpoint.folder import has_weights
from rootlace.runtime.model.checkpoint.loader import open_checkpoint
from rootlace.runtime.model.checkpoint.quantised.quantisation import Quantisation
from rootlace.runtime.model.checkpoint.weights import layer_parts
from rootlace.runtime.model.families.spec import ModelSpec


def quantised_bytes(config: ModelConfig, dtype: torch.dtype) -> int | None:
    """About what the weights take, dense ones in `dtype`; None where none are quantised. Where the
    folder has no weights, all are taken to be quantised but those of embedding and head."""
    if config.quantisation is None:
        return None
    if not has_weights(config.path):
        return _foreseen(config.spec, config.quantisation, dtype.itemsize)
    opened, total = open_checkpoint(config), 0
    for name, what in opened.expected.items():
        itemsize = dtype.itemsize if what.types == FLOATS else None
        total += opened.checkpoint.num_bytes(name, itemsize)
    return total


def _foreseen(spec: ModelSpec, quantisation: Quantisation, itemsize: int) -> int:
    ends = spec.vocab_size * (1 if spec.tied_embeddings else 2)
    total = (ends + 1) * spec.hidden_size * itemsize
    for index in range(spec.num_layers):
        for part in layer_parts(spec, index).values():
            numbers = part.biases() if part.columns else part.weights() | part.biases()
            found = [Expected((shape,)) for shape in numbers.values()]
            for module, rows in zip(part.modules, part.rows, strict=True):
                if part.columns is None:
                    continue
                layouts = quantisation.layouts(module)
                dense = {"": Expected(((rows, part.columns),))}
                found += (layouts[0].needed(rows, part.columns) if layouts else dense).values()
            total += sum(what.num_bytes(itemsize) for what in found)
    return total
