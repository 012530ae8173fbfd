"""Tokens picked in C++: `reference/pick_tokens.py`, without a copy of the logits."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import torch

from rootlace.kernels.interface import Choice, KernelSet, PickRows
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.score_tokens import NativeScoreTokens
from rootlace.kernels.reference import REFERENCE

DRAW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.int64),
        ("position", np.int64),
        ("mask", np.int64),
        ("top_k", np.int32),
        ("unused", np.int32),
    ]
)
"""`RlDraw` of api.h."""
_COPIED = ("temperature", "top_p", "min_p", "seed", "position", "top_k")


def native_kernels(library: ctypes.CDLL, team: Team) -> KernelSet:
    """The reference's kernels, with tokens picked and scored in C++. (The native decoder itself is
    no set of operations: it computes a step in one call.)"""
    return replace(
        REFERENCE,
        name="native",
        pick_tokens=NativePickTokens(library, team),
        score_tokens=NativeScoreTokens(library, team),
    )


class NativePickTokens:
    """See `interface.PickTokens`. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team

    def __call__(
        self,
        logits: torch.Tensor,
        rows: PickRows,
        choice: Choice,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = logits.to(torch.float32).contiguous()
        count, vocab = logits.shape
        masks, _kept = _addresses(rows, vocab)
        tokens = out
        if tokens is None or tokens.dtype != torch.int32 or not tokens.is_contiguous():
            tokens = torch.empty(count, dtype=torch.int32)
        given = self._team.handle, logits.data_ptr(), count, vocab
        if choice == "greedy":
            where = None if masks is None else masks.ctypes.data
            self._library.rl_best(*given, where, tokens.data_ptr())
        else:
            draws = np.empty(count, DRAW)
            for name in _COPIED:
                draws[name] = getattr(rows, name).numpy()
            draws["mask"] = 0 if masks is None else masks
            self._library.rl_draw(*given, draws.ctypes.data, tokens.data_ptr())
        return tokens if out is None or out is tokens else out.copy_(tokens)


def _addresses(rows: PickRows, vocab: int) -> tuple[np.ndarray | None, torch.Tensor | None]:
    """(where each row's mask lies, int64, 0: all is allowed; what must be kept until it is read).
    None: no row has a mask."""
    if rows.mask_row is None:
        return None, None
    assert rows.mask_table is not None
    table = rows.mask_table.contiguous()
    missing = -(-vocab // 32) - table.shape[1]
    if missing > 0:  # the kernels read a word for every 32 tokens
        table = torch.nn.functional.pad(table, (0, missing))
    row = rows.mask_row.numpy().astype(np.int64)
    where = table.data_ptr() + row * (table.stride(0) * table.element_size())
    return np.where(row >= 0, where, 0), table
