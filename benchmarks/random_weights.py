"""Random weights of any model whose layers are products and norms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rootlace.kernels.weights import Dense
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.quantised.layouts import Shape
from rootlace.runtime.model.checkpoint.weights import (
    ExpertWeights,
    LayerWeights,
    ModelWeights,
    layer_parts,
)
from rootlace.runtime.model.families.spec import ModelSpec

SEED = 20_240_607


def save_weights(folder: Path, device: str) -> None:
    """Write bfloat16 weights beside the `config.json` in `folder`; made on `device`."""
    spec = ModelConfig.read(folder).spec
    weights = random_weights(spec, torch.device(device), torch.bfloat16)
    save_file(named_weights(spec, weights), folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Draw normal weights that keep activations at unit scale, so that logits are not flat; norms
    are one."""
    generator = torch.Generator(device).manual_seed(SEED)

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=dtype, device=device)

    def normal(rows: int, columns: int, spread: float) -> torch.Tensor:
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        return weight.normal_(0.0, spread, generator=generator)

    def small(count: int) -> torch.Tensor:
        return normal(1, count, 0.05)[0]

    def layer(index: int) -> LayerWeights:
        found: dict[str, Any] = {}
        biases: dict[str, torch.Tensor] = {}
        for name, part in layer_parts(spec, index).items():
            rows, columns = sum(part.rows), part.columns
            if columns:
                matrix = normal(rows, columns, columns**-0.5)
                found[name] = Dense(matrix, small(rows) if part.bias else None)
                continue
            found[name] = ones(rows)
            if part.bias:
                biases[name] = small(rows)
        experts: list[ExpertWeights] = []
        while f"experts.{len(experts)}.down" in found:
            own = f"experts.{len(experts)}"
            experts.append(ExpertWeights(found.pop(f"{own}.gate_up"), found.pop(f"{own}.down")))
        return LayerWeights(**found, experts=tuple(experts), norm_biases=biases)

    layers = tuple(layer(index) for index in range(spec.num_layers))
    head = embedding = normal(spec.vocab_size, spec.hidden_size, 0.05)
    if not spec.tied_embeddings:
        head = normal(spec.vocab_size, spec.hidden_size, 0.05)
    return ModelWeights(
        embedding,
        layers,
        ones(spec.hidden_size),
        Dense(head),
        final_norm_bias=small(spec.hidden_size) if spec.norm.bias else None,
    )


def named_weights(spec: ModelSpec, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Return random weights by their names in a checkpoint, without a tied head."""
    named = {
        f"{spec.names.embedding}.weight": weights.embedding,
        f"{spec.names.final_norm}.weight": weights.final_norm - spec.norm.offset,
    }
    if weights.final_norm_bias is not None:
        named[f"{spec.names.final_norm}.bias"] = weights.final_norm_bias
    if not spec.tied_embeddings and isinstance(weights.head, Dense):
        named[f"{spec.names.head}.weight"] = weights.head.matrix
    for index, layer in enumerate(weights.layers):
        for name, part in layer_parts(spec, index).items():
            weight = layer.part(name)
            if isinstance(weight, Dense):
                numbers, bias = weight.matrix, weight.bias
            else:
                numbers, bias = weight - spec.norm.offset, layer.norm_biases.get(name)
            named |= _apart(part.weights(), numbers)
            if bias is not None:
                named |= _apart(part.biases(), bias)
    return named


def _apart(shapes: Mapping[str, Shape], joined: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split joined rows by the names of their parts."""
    rows = [shape[0] for shape in shapes.values()]
    return dict(zip(shapes, joined.split(rows), strict=True))
