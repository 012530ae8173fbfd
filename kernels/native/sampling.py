"""Tokens picked in C++: `reference/sampling.py`, without a copy of the logits."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace

import torch

from rootlace.kernels.interface import Choice, KernelSet, LogitEdits, PickRows, Scores
from rootlace.kernels.native.library import Edits, Team
from rootlace.kernels.reference import REFERENCE

# Edit logits --------------------------------------------------------------------------------------
#
# Logits edited in C++: `reference/sampling.py`, by all threads.


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


# Score tokens -------------------------------------------------------------------------------------
#
# Log-probabilities in C++: `reference/sampling.py`, by all threads and without copies.


class NativeScoreTokens:
    """See `interface.ScoreTokens`. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Scores:
        logits = logits.to(torch.float32).contiguous()
        tokens = tokens.to(torch.int32).contiguous()
        count, vocab = logits.shape
        if tokens.shape != (count,):
            raise ValueError(f"{list(tokens.shape)} tokens for {count} rows")
        top = min(top, vocab)
        logprobs = torch.empty(count)
        top_ids = torch.empty(count, top, dtype=torch.int32)
        top_logprobs = torch.empty(count, top)
        self._library.rl_scores(
            self._team.handle,
            logits.data_ptr(),
            count,
            vocab,
            tokens.data_ptr(),
            top,
            logprobs.data_ptr(),
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
        )
        return logprobs, top_ids, top_logprobs


# Pick tokens --------------------------------------------------------------------------------------


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
