"""Tokens picked in C++: `reference/pick_tokens.py`, without a copy of the logits."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import torch

from rootlace.kernels.interface import Choice, KernelSet, PickRows
from rootlace.kernels.native.handles import Team
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.uniform import random_bits

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


def native_kernels(library: ctypes.CDLL, team: Team) -> KernelSet:
    """The reference's kernels, with tokens picked in C++. (The native decoder itself is no set of
    operations: it computes a step in one call.)"""
    return replace(REFERENCE, name="native", pick_tokens=NativePickTokens(library, team))


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
        masks, _kept = _addresses(rows, logits.shape[1])
        drawn = np.zeros(len(logits), bool)
        if choice != "greedy":
            drawn = rows.temperature.numpy() > 0
        found = np.empty(len(logits), np.int32)
        if not drawn.all():
            self._best(logits, masks, found)
        if drawn.all():
            self._draw(logits, _draws(rows, masks), found)
        elif drawn.any():
            chosen = np.flatnonzero(drawn)
            tokens = np.empty(len(chosen), np.int32)
            self._draw(logits[torch.from_numpy(chosen)], _draws(rows, masks)[chosen], tokens)
            found[chosen] = tokens
        tokens_found = torch.from_numpy(found)
        return tokens_found if out is None else out.copy_(tokens_found)

    def _best(self, logits: torch.Tensor, masks: np.ndarray | None, out: np.ndarray) -> None:
        self._library.rl_best(
            self._team.handle,
            logits.data_ptr(),
            *logits.shape,
            None if masks is None else masks.ctypes.data,
            out.ctypes.data,
        )

    def _draw(self, logits: torch.Tensor, draws: np.ndarray, out: np.ndarray) -> None:
        self._library.rl_draw(
            self._team.handle, logits.data_ptr(), *logits.shape, draws.ctypes.data, out.ctypes.data
        )


def _draws(rows: PickRows, masks: np.ndarray | None) -> np.ndarray:
    draws = np.zeros(len(rows.temperature), DRAW)
    for name in ("temperature", "top_p", "min_p", "top_k"):
        draws[name] = getattr(rows, name).numpy()
    draws["u"] = random_bits(rows.seed.numpy(), rows.position.numpy()) * 2.0**-53
    if masks is not None:
        draws["mask"] = masks
    return draws


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
