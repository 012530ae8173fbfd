"""Tokens picked in C++: `reference/pick_tokens.py`, without a copy of the logits."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace

import torch

from rootlace.kernels.interface import Choice, KernelSet, PickRows
from rootlace.kernels.native.edit_logits import NativeEditLogits, check_mask_rows
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.score_tokens import NativeScoreTokens
from rootlace.kernels.reference import REFERENCE

_COLUMNS = (
    ("temperature", torch.float64),
    ("top_p", torch.float64),
    ("min_p", torch.float64),
    ("seed", torch.int64),
    ("position", torch.int64),
    ("top_k", torch.int32),
)
"""The first fields of `RlPicks` of api.h."""


def native_kernels(library: ctypes.CDLL, team: Team) -> KernelSet:
    """The reference's kernels, with logits edited and tokens picked and scored in C++. (The native
    decoder itself is no set of operations: it computes a step in one call.)"""
    return replace(
        REFERENCE,
        name="native",
        edit_logits=NativeEditLogits(library, team),
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
        if out is not None and out.shape != (count,):
            raise ValueError(f"room for {list(out.shape)} tokens, {count} rows")
        columns = ((getattr(rows, name), dtype) for name, dtype in _COLUMNS)
        kept = [one if one.dtype is dtype else one.to(dtype) for one, dtype in columns]
        numbers = array("q", [number for values in kept for number in _column(values, count)])
        if rows.mask_row is None:
            numbers.extend((0, 0, 0))
        else:
            assert rows.mask_table is not None
            table, row = _whole(rows.mask_table, vocab), rows.mask_row.to(torch.int32)
            numbers.extend((table.data_ptr(), *_column(row, count)))
            check_mask_rows(row, len(table))
        tokens = out
        if tokens is None or tokens.dtype != torch.int32 or not tokens.is_contiguous():
            tokens = torch.empty(count, dtype=torch.int32)
        self._library.rl_pick(
            self._team.handle,
            logits.data_ptr(),
            count,
            vocab,
            numbers.buffer_info()[0],
            tokens.data_ptr(),
        )
        return tokens if out is None or out is tokens else out.copy_(tokens)


def _column(values: torch.Tensor, count: int) -> tuple[int, int]:
    """`RlColumn` of api.h."""
    if values.shape != (count,):
        raise ValueError(f"a column of {list(values.shape)} for {count} rows")
    return values.data_ptr(), values.stride(0) * values.element_size()


def _whole(table: torch.Tensor, vocab: int) -> torch.Tensor:
    """Masks with a word for every 32 tokens, as the kernels read them."""
    words = -(-vocab // 32)
    if table.shape[1] < words:
        return torch.nn.functional.pad(table, (0, words - table.shape[1]))
    return table[:, :words].contiguous()
