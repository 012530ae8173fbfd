"""Tokens picked in C++: `reference/sampling.py`, without a copy of the logits."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from dataclasses import replace

import torch

from rootlace.kernels.interface import Choice, KernelSet, LogitEdits, PickRows, Scores
from rootlace.kernels.native.library import Edits, Team
from rootlace.kernels.reference import REFERENCE

# Columns ------------------------------------------------------------------------------------------
#
# Numbers per row that C++ takes by name (`src/columns.h`): the sources list them, in order.


_TYPES = {"double": torch.float64, "int32_t": torch.int32}


def declared_columns(text: bytes) -> dict[str, torch.dtype]:
    """The columns that `rl_penalties` or `rl_pick_params` lists, in order."""
    pairs = (one.split() for one in text.decode().split(",") if one)
    return {name: _TYPES[kind] for kind, name in pairs}


def _columns(
    declared: Mapping[str, torch.dtype], values: Mapping[str, torch.Tensor], count: int
) -> tuple[list[int], list[torch.Tensor]]:
    """(`RlColumn` of each declared column, one behind the other; the tensors that these point to).

    Raises ValueError where names or lengths are not those that C++ reads.
    """
    if values.keys() != declared.keys():
        raise ValueError(f"given are {sorted(values)}, the kernel reads {sorted(declared)}")
    kept = [values[name].to(dtype) for name, dtype in declared.items()]
    return [number for each in kept for number in _column(each, count)], kept


def _column(values: torch.Tensor, count: int) -> tuple[int, int]:
    """`RlColumn` of api.h."""
    if values.shape != (count,):
        raise ValueError(f"a column of {list(values.shape)} for {count} rows")
    return values.data_ptr(), values.stride(0) * values.element_size()


# Edit logits --------------------------------------------------------------------------------------
#
# Logits edited in C++: `reference/sampling.py`, by all threads.


class NativeEditLogits:
    """See `interface.EditLogits`. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team
        self._penalties = declared_columns(library.rl_penalties())

    def __call__(self, logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
        logits = logits.to(torch.float32).contiguous()
        _check(edits, len(logits))
        given = Edits()
        kept = []
        if edits.seen_start is not None:
            penalties, values = _columns(self._penalties, edits.penalties, len(logits))
            kept += values
            numbers = array("q", penalties)
            given.penalties = numbers.buffer_info()[0]
        for name, values in vars(edits).items():
            if name == "penalties" or values is None:
                continue
            kept.append(values.to(torch.float32 if name == "bias" else torch.int32).contiguous())
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
    if edits.mask_row is not None:
        if len(edits.mask_row) != rows:
            raise ValueError(f"mask_row: not one for each of {rows} rows")
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
        self._params = declared_columns(library.rl_pick_params())

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
        params, _kept = _columns(self._params, rows.params, count)
        seed, position = rows.seed.to(torch.int64), rows.position.to(torch.int64)
        numbers = array("q", (*_column(seed, count), *_column(position, count)))
        if rows.mask_row is None:
            numbers.extend((0, 0, 0))
        else:
            assert rows.mask_table is not None
            table, row = _whole(rows.mask_table, vocab), rows.mask_row.to(torch.int32)
            numbers.extend((table.data_ptr(), *_column(row, count)))
            check_mask_rows(row, len(table))
        numbers.extend(params)
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


def _whole(table: torch.Tensor, vocab: int) -> torch.Tensor:
    """Masks with a word for every 32 tokens, as the kernels read them."""
    words = -(-vocab // 32)
    if table.shape[1] < words:
        return torch.nn.functional.pad(table, (0, words - table.shape[1]))
    return table[:, :words].contiguous()
