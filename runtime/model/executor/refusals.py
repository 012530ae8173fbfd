"""What a configuration may not ask for, of this model or on this machine."""

from __future__ import annotations

import torch

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.wire.errors import InvalidRequest


def check_context_length(asked: int | None, config: ModelConfig) -> None:
    """Raises `InvalidRequest` for a context that is longer than the model's own."""
    most = config.spec.max_context
    if asked is not None and not 0 < asked <= most:
        raise InvalidRequest(
            f"context_length {asked} is not between 1 and the model's {most} "
            f"({config.file}: max_position_embeddings, and what extends it)"
        )


def check_without_native(asked: str, reason: str) -> None:
    """Raises `InvalidRequest` where the kernels asked for are the native ones, which cannot be had
    for this `reason`."""
    if asked == "native":
        raise InvalidRequest(f"kernels 'native': {reason}")


def check_gpu_kernels(asked: str, device: torch.device) -> None:
    """Raises `InvalidRequest` where kernels are asked for that are not a GPU's."""
    if asked == "native":
        raise InvalidRequest(f"kernels 'native' are a CPU's, the device is {device}")
