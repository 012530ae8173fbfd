"""Editing of logits, and picking and scoring of tokens, in C++ by all threads:
`reference/sampling.py`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import asdict

from rootlace.kernels.interface import Choice, HostSampling, LogitEdits, PickRows
from rootlace.kernels.native.library import Edits, Team

# Columns ------------------------------------------------------------------------------------------
#
# Numbers per row that C++ takes by name (`src/columns.h`). C++ sources list the names in order.


_TYPES: dict[str, np.dtype[Any]] = {"double": np.dtype(np.float64), "int32_t": np.dtype(np.int32)}


def declared_columns(text: bytes) -> dict[str, np.dtype[Any]]:
    """Return the columns that `rl_penalties` or `rl_pick_params` lists, in order."""
    pairs = (one.split() for one in text.decode().split(",") if one)
    return {name: _TYPES[kind] for kind, name in pairs}


def _columns(
    declared: Mapping[str, np.dtype[Any]], values: Mapping[str, np.ndarray], count: int
) -> tuple[list[int], list[np.ndarray]]:
    """Return (`RlColumn` of each declared column, one behind the other; the arrays that these point
    to). Raises ValueError if names or lengths differ from those that C++ reads."""
    if values.keys() != declared.keys():
        raise ValueError(f"given are {sorted(values)}, the kernel reads {sorted(declared)}")
    arrays = [np.asarray(values[name], dtype) for name, dtype in declared.items()]
    return [number for each in arrays for number in _column(each, count)], arrays


def _column(values: np.ndarray, count: int) -> tuple[int, int]:
    """Return the fields of an `RlColumn` (api.h): address and stride in bytes."""
    if values.shape != (count,):
        raise ValueError(f"a column of {list(values.shape)} for {count} rows")
    return values.ctypes.data, values.strides[0]


# Sampling -----------------------------------------------------------------------------------------


class NativeSampling:
    """`HostSampling` in C++, by all threads. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team
        self._penalties = declared_columns(library.rl_penalties())
        self._params = declared_columns(library.rl_pick_params())

    def edit_logits(self, logits: np.ndarray, edits: LogitEdits) -> np.ndarray:
        """Edit logits (`interface.EditLogits`)."""
        logits = np.ascontiguousarray(logits, np.float32)
        _check(edits, len(logits))
        arguments = Edits()
        arrays = []
        if edits.seen_start is not None:
            penalties, values = _columns(self._penalties, edits.penalties, len(logits))
            arrays += values
            numbers = array("q", penalties)
            arguments.penalties = numbers.buffer_info()[0]
        for name, values in asdict(edits).items():
            if name == "penalties" or values is None:
                continue
            arrays.append(np.ascontiguousarray(values, np.float32 if name == "bias" else np.int32))
            setattr(arguments, name, arrays[-1].ctypes.data)
            if name == "mask_table":
                arguments.mask_words = values.shape[1]
        edited = np.empty_like(logits)
        self._library.rl_edit(
            self._team.handle,
            logits.ctypes.data,
            *logits.shape,
            ctypes.addressof(arguments),
            edited.ctypes.data,
        )
        return edited

    def pick_tokens(
        self, logits: np.ndarray, rows: PickRows, choice: Choice, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Pick tokens (`interface.PickTokens`)."""
        logits = np.ascontiguousarray(logits, np.float32)
        count, vocab = logits.shape
        if out is not None and tuple(out.shape) != (count,):
            raise ValueError(f"room for {list(out.shape)} tokens, {count} rows")
        params, _kept = _columns(self._params, rows.params, count)
        seed, position = np.asarray(rows.seed, np.int64), np.asarray(rows.position, np.int64)
        numbers = array("q", (*_column(seed, count), *_column(position, count)))
        if rows.mask_row is None:
            numbers.extend((0, 0, 0))
        else:
            assert rows.mask_table is not None
            table = _whole(np.asarray(rows.mask_table), vocab)
            row = np.asarray(rows.mask_row, np.int32)
            numbers.extend((table.ctypes.data, *_column(row, count)))
            check_mask_rows(row, len(table))
        numbers.extend(params)
        tokens = np.empty(count, np.int32)
        self._library.rl_pick(
            self._team.handle,
            logits.ctypes.data,
            count,
            vocab,
            numbers.buffer_info()[0],
            tokens.ctypes.data,
        )
        if out is None:
            return tokens
        out[:] = tokens
        return out

    def score_tokens(
        self, logits: np.ndarray, tokens: np.ndarray, top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score tokens (`interface.ScoreTokens`)."""
        logits = np.ascontiguousarray(logits, np.float32)
        tokens = np.ascontiguousarray(tokens, np.int32)
        count, vocab = logits.shape
        if tokens.shape != (count,):
            raise ValueError(f"{list(tokens.shape)} tokens for {count} rows")
        top = min(top, vocab)
        logprobs = np.empty(count, np.float32)
        top_ids = np.empty((count, top), np.int32)
        top_logprobs = np.empty((count, top), np.float32)
        self._library.rl_scores(
            self._team.handle,
            logits.ctypes.data,
            count,
            vocab,
            tokens.ctypes.data,
            top,
            logprobs.ctypes.data,
            top_ids.ctypes.data,
            top_logprobs.ctypes.data,
        )
        return logprobs, top_ids, top_logprobs


def native_sampling(library: ctypes.CDLL, team: Team) -> HostSampling:
    """Return the operations of `HostSampling` in C++."""
    native = NativeSampling(library, team)
    return HostSampling(native.edit_logits, native.pick_tokens, native.score_tokens)


def check_mask_rows(rows: np.ndarray, masks: int) -> None:
    """Raise ValueError if a row's mask is outside the table."""
    if len(rows) and int(rows.max()) >= masks:
        raise ValueError(f"mask {int(rows.max())} of a table of {masks}")


def _check(edits: LogitEdits, rows: int) -> None:
    """Raise ValueError unless all lengths fit. The kernel skips tokens outside the vocabulary."""
    lists = {"bias_start": ("bias_token", "bias"), "seen_start": ("seen_token", "seen_count")}
    for start, names in lists.items():
        bounds = getattr(edits, start)
        if bounds is None:
            continue
        ordered = tuple(bounds.shape) == (rows + 1,) and bool((bounds[1:] >= bounds[:-1]).all())
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


def _whole(table: np.ndarray, vocab: int) -> np.ndarray:
    """Return the masks with a word per 32 tokens, as the kernels read them."""
    words = -(-vocab // 32)
    if table.shape[1] < words:
        return np.pad(table, ((0, 0), (0, words - table.shape[1])))
    return np.ascontiguousarray(table[:, :words])
