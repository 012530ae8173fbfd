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
        if where is None:
            self._library.rl_argmax(
                self._team.handle, logits.data_ptr(), rows, vocab, tokens.ctypes.data
            )
        else:
            self._library.rl_best(
                self._team.handle,
                logits.data_ptr(),
                rows,
                vocab,
                where.ctypes.data,
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
        if where is not None:
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


def _addresses(masks: Masks, words: int) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """int64: where the masks lie, of `words` words each, 0 where all is allowed; None if it is
    everywhere. The list is to be kept as long as they are read."""
    found: list[int] = []
    kept: list[np.ndarray] = []
    for mask in masks:
        if mask is None:
            found.append(0)
        elif isinstance(mask, MaskRow) and mask.address:
            found.append(mask.address)
        else:
            whole = np.ascontiguousarray(words_of(mask))
            if len(whole) < words:  # nothing is allowed beyond its end
                whole = np.pad(whole, (0, words - len(whole)))
            kept.append(whole)
            found.append(whole.ctypes.data)
    return (np.array(found, np.int64) if any(found) else None), kept
