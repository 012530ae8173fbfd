"""The memory that weights take."""

from __future__ import annotations

import torch
from msgspec.structs import asdict

from rootlace.kernels.weights import tensors
from rootlace.runtime.model.checkpoint.weights import ModelWeights


def num_bytes(weights: ModelWeights) -> int:
    """Memory taken, tied weights counted once."""
    found = [weights.embedding, weights.final_norm]
    found += tensors(weights.head) if weights.head is not None else []
    found += [one for one in (weights.final_norm_bias, weights.positions) if one is not None]
    for layer in weights.layers:
        found += layer.norm_biases.values()
        for weight in layer.products():
            found += tensors(weight)
        found += [part for part in asdict(layer).values() if isinstance(part, torch.Tensor)]
    return sum({id(tensor): tensor.nbytes for tensor in found}.values())
