"""Tokens picked in C++ (`kernels/native`), by the rule of `sampler`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from rootlace.kernels.native.handles import Team
from rootlace.runtime.contracts.plan import MaskRow, SampleRow
from rootlace.runtime.model.sampling.mask_tables import words_of
from rootlace.runtime.model.sampling.sampler import Masks, row_uniforms

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
        addresses, _kept = addresses_of(masks, vocab)
        self._library.rl_best(
            self._team.handle,
            logits.data_ptr(),
            rows,
            vocab,
            addresses.buffer_info()[0] if addresses else None,
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
        addresses, _kept = addresses_of(masks, vocab)
        if addresses:
            draws["mask"] = addresses
        self._library.rl_draw(
            self._team.handle,
            logits.data_ptr(),
            len(rows),
            vocab,
            draws.ctypes.data,
            tokens.ctypes.data,
        )
        return tokens


def addresses_of(masks: Masks, vocab: int) -> tuple[array[int], list[np.ndarray]]:
    """Where the masks lie, int64, 0 where all is allowed; empty if it is everywhere. The arrays are
    to be kept as long as they are read."""
    found = [mask.address if type(mask) is MaskRow else 0 for mask in masks]
    kept: list[np.ndarray] = []
    if 0 in found:
        words = -(-vocab // 32)
        for at, mask in enumerate(masks):
            if mask is None or found[at]:
                continue
            whole = np.ascontiguousarray(words_of(mask))
            if len(whole) < words:  # nothing is allowed beyond its end
                whole = np.pad(whole, (0, words - len(whole)))
            kept.append(whole)
            found[at] = whole.ctypes.data
    return array("q", found if any(found) else ()), kept
