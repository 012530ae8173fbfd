"""Weights rounded to few bits while they are read (`--quantize`), layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from rootlace.kernels import Dense, Scheme, Weight
from rootlace.kernels.reference.linear import quantise
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, Progress
from rootlace.runtime.model.checkpoint.weights import ModelWeights, OnDemand
from rootlace.wire.errors import InvalidRequest

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
