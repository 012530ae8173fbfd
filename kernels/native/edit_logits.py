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
        _check(edits, len(logits))
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


def check_mask_rows(rows: torch.Tensor, masks: int) -> None:
    """Raises `ValueError` if a row's mask is none of the table's."""
    if len(rows) and int(rows.max()) >= masks:
        raise ValueError(f"mask {int(rows.max())} of a table of {masks}")


def _check(edits: LogitEdits, rows: int) -> None:
    """Raises `ValueError` unless all lengths fit. Tokens that there are not, the kernel skips."""
    lists = {"bias_start": ("bias_token", "bias"), "seen_start": ("seen_token", "seen_count")}
    for start, names in lists.items():
        bounds = getattr(edits, start)
        if bounds is None:
            continue
        ordered = bounds.shape == (rows + 1,) and bool((bounds.diff() >= 0).all())
        if not ordered or int(bounds[0]) < 0:
            raise ValueError(f"{start}: must be {rows + 1} ascending numbers")
        if any(_length(edits, name) < int(bounds[-1]) for name in names):
            raise ValueError(f"{names}: fewer entries than {start} says")
    each = ["mask_row"] if edits.mask_row is not None else []
    if edits.seen_start is not None:
        each += ["repetition_penalty", "frequency_penalty", "presence_penalty"]
    if any(_length(edits, name) != rows for name in each):
        raise ValueError(f"{each}: not one for each of {rows} rows")
    if edits.mask_row is not None:
        check_mask_rows(edits.mask_row, _length(edits, "mask_table"))


def _length(edits: LogitEdits, name: str) -> int:
    values = getattr(edits, name)
    return 0 if values is None else len(values)
