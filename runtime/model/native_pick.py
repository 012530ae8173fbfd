"""Tokens picked in C++ (`kernels/native`), by the rule of `sampler`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from rootlace.kernels.native.handles import Team
from rootlace.runtime.model.mask_tables import words_of
from rootlace.runtime.model.sampler import Masks, row_uniforms
from rootlace.runtime.scheduler.plan import MaskRow, SampleRow

DRAW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("u", np.float64),
        ("mask", np.int64),
        ("top_k", np.int32),
        ("unused", np.int32),
    ]
)
"""`RlDraw` of api.h."""


class NativePick:
    """See `sampler.Pick`."""

    draws_masked = True

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team

    def best(self, logits: torch.Tensor, masks: Masks = ()) -> np.ndarray:
        rows, vocab = logits.shape
        tokens = np.empty(rows, np.int32)
        logits = logits.contiguous()
        where, _kept = _addresses(masks, -(-vocab // 32))
        if not where:
            self._library.rl_argmax(
                self._team.handle, logits.data_ptr(), rows, vocab, tokens.ctypes.data
            )
        else:
            self._library.rl_best(
                self._team.handle,
                logits.data_ptr(),
                rows,
                vocab,
                (ctypes.c_int64 * rows)(*where),  # in a third of the time that NumPy takes
                tokens.ctypes.data,
            )
        return tokens

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], masks: Masks = ()
    ) -> np.ndarray:
        vocab = logits.shape[1]
        tokens = np.empty(len(rows), np.int32)
        logits = logits.contiguous()
        params = [row.params for row in rows]
        draws = np.zeros(len(rows), DRAW)
        draws["temperature"] = [one.temperature for one in params]
        draws["top_p"] = [one.top_p for one in params]
        draws["min_p"] = [one.min_p for one in params]
        draws["top_k"] = [vocab if one.top_k == -1 else min(one.top_k, vocab) for one in params]
        draws["u"] = row_uniforms(rows)
        where, _kept = _addresses(masks, -(-vocab // 32))
        if where:
            draws["mask"] = where
        self._library.rl_draw(
            self._team.handle,
            logits.data_ptr(),
            len(rows),
            vocab,
            draws.ctypes.data,
            tokens.ctypes.data,
        )
        return tokens


def _addresses(masks: Masks, words: int) -> tuple[list[int], list[np.ndarray]]:
    """Where the masks lie, of `words` words each, 0 where all is allowed; empty if it is
    everywhere. The arrays are to be kept as long as they are read."""
    found = [mask.address if type(mask) is MaskRow else 0 for mask in masks]
    kept: list[np.ndarray] = []
    if 0 in found:
        for at, mask in enumerate(masks):
            if mask is None or found[at]:
                continue
            whole = np.ascontiguousarray(words_of(mask))
            if len(whole) < words:  # nothing is allowed beyond its end
                whole = np.pad(whole, (0, words - len(whole)))
            kept.append(whole)
            found[at] = whole.ctypes.data
    return found if any(found) else [], kept
