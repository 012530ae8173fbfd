"""Logits edited in C++: `reference/logits.py`, by all threads."""

from __future__ import annotations

import ctypes

import torch

from rootlace.kernels.interface import LogitEdits
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.library import Edits

_FLOATS = {
    "bias": torch.float32,
    "repetition_penalty": torch.float32,
    "frequency_penalty": torch.float64,
    "presence_penalty": torch.float64,
}
"""All others are int32."""


class NativeEditLogits:
    """See `interface.EditLogits`. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team

    def __call__(self, logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
        logits = logits.to(torch.float32).contiguous()
        given = Edits()
        kept = []
        for name, values in vars(edits).items():
            if values is None:
                continue
            kept.append(values.to(_FLOATS.get(name, torch.int32)).contiguous())
            setattr(given, name, kept[-1].data_ptr())
            if name == "mask_table":
                given.mask_words = values.shape[1]
        edited = torch.empty_like(logits)
        self._library.rl_edit(
            self._team.handle,
            logits.data_ptr(),
            *logits.shape,
            ctypes.addressof(given),
            edited.data_ptr(),
        )
        return edited
