"""Request traces as files: Mooncake's JSON lines and Azure's CSV, plain or gzipped."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's `hash_ids` stands for."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class BadTrace(ValueError):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Trace:
    """N requests in order of arrival.

    `arrivals` (float64 [N]) are seconds since the first; `prompt_tokens` and `output_tokens` int64
    [N]. Request i's prompt consists of `blocks[starts[i]:starts[i + 1]]` (int64, ids from 0 without
    gaps), each of `block_tokens` tokens but the last, which has the rest. Two requests have the
    same block if and only if their prompts agree up to its end.
    """

    name: str
    format: str
    arrivals: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    blocks: np.ndarray
    starts: np.ndarray
    block_tokens: int

    def __len__(self) -> int:
        return len(self.arrivals)

    @cached_property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return int(self.blocks.max(initial=-1)) + 1


@dataclass(slots=True)
class _Row:
    seconds: float
    prompt: int
    output: int
    hashes: list[Any]


def read_trace(path: Path) -> Trace:
    """Read a trace, whose format is seen from its first line.

    Raises BadTrace with file and line of what is wrong, OSError if the file cannot be read.
    """
    lines = ((number, line) for number, line in enumerate(_lines(path), 1) if line.strip())
    number, line = next(lines, (0, ""))
    if not number:
        raise BadTrace(f"{path} is empty")
    if line.lstrip().startswith("{"):
        rows = list(_mooncake(path, chain([(number, line)], lines)))
        return _assemble(path, "mooncake", rows, MOONCAKE_BLOCK)
    header = [column.strip() for column in next(csv.reader([line]))]
    if not set(_AZURE_COLUMNS) <= set(header):
        _bad(path, number, f"neither a JSON object nor a header with {', '.join(_AZURE_COLUMNS)}")
    rows = list(_azure(path, header, lines))
    return _assemble(path, "azure", rows, max((row.prompt for row in rows), default=1))


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    number = 0
    with gzip.open(path) if packed else path.open("rb") as opened:
        try:
            for raw in opened:
                number += 1
                yield raw.decode().removeprefix("\ufeff")
        except UnicodeDecodeError:
            _bad(path, number, "not UTF-8")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            _bad(path, number + 1, f"not gzip from here on: {error}")


def _mooncake(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except ValueError as error:
            _bad(path, number, f"not JSON: {error}")
        if not isinstance(record, dict):
            _bad(path, number, "not a JSON object")
        for name in _MOONCAKE_FIELDS:
            if name not in record:
                _bad(path, number, f"has no {name!r}")
        milliseconds = record["timestamp"]
        if not _is_number(milliseconds) or milliseconds < 0:
            _bad(path, number, f"timestamp must be milliseconds, not {milliseconds!r}")
        prompt = _count(path, number, "input_length", record["input_length"], 1)
        output = _count(path, number, "output_length", record["output_length"], 0)
        hashes = record["hash_ids"]
        if not isinstance(hashes, list) or not all(type(each) is int for each in hashes):
            _bad(path, number, "hash_ids must be a list of integers")
        blocks = -(-prompt // MOONCAKE_BLOCK)
        if len(hashes) != blocks:
            _bad(path, number, f"{prompt} tokens are {blocks} blocks, hash_ids has {len(hashes)}")
        yield _Row(milliseconds / 1000, prompt, output, hashes)


def _azure(path: Path, header: list[str], lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    where = [header.index(column) for column in _AZURE_COLUMNS]
    first: datetime | None = None
    for number, line in lines:
        fields = next(csv.reader([line]))
        if len(fields) != len(header):
            _bad(path, number, f"{len(fields)} fields, the header has {len(header)}")
        stamp, prompt, output = (fields[at].strip() for at in where)
        try:
            time = datetime.fromisoformat(stamp)
        except ValueError:
            _bad(path, number, f"TIMESTAMP must be a date and time, not {stamp!r}")
        first = first or time
        try:
            seconds = (time - first).total_seconds()
        except TypeError:
            _bad(path, number, "TIMESTAMP has a time zone, or has none, unlike the lines before")
        # What a prompt consists of is not told: each is one block of its own.
        yield _Row(
            seconds,
            _count(path, number, "ContextTokens", _integer(prompt), 1),
            _count(path, number, "GeneratedTokens", _integer(output), 0),
            [number],
        )


def _assemble(path: Path, form: str, rows: list[_Row], block_tokens: int) -> Trace:
    if not rows:
        raise BadTrace(f"{path} has no requests")
    rows.sort(key=lambda row: row.seconds)
    ids = _canonical(rows, block_tokens)
    return Trace(
        name=path.name,
        format=form,
        arrivals=np.array([row.seconds for row in rows]) - rows[0].seconds,
        prompt_tokens=np.array([row.prompt for row in rows], np.int64),
        output_tokens=np.array([row.output for row in rows], np.int64),
        blocks=np.array(ids, np.int64),
        starts=np.cumsum([0, *(len(row.hashes) for row in rows)]),
        block_tokens=block_tokens,
    )


def _canonical(rows: list[_Row], block_tokens: int) -> list[int]:
    """One id per distinct prefix: a file's ids may say what is in a block, and not what is before
    it; and equal ids of a last block count only if it is as long."""
    known: dict[tuple[int, int, int], int] = {}
    ids: list[int] = []
    for row in rows:
        before, left = -1, row.prompt
        for each in row.hashes:
            key = (before, each, min(left, block_tokens))
            before = known.setdefault(key, len(known))
            left -= block_tokens
            ids.append(before)
    return ids


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _integer(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _count(path: Path, number: int, name: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value < 2**31:
        _bad(path, number, f"{name} must be an integer of at least {least}, not {value!r}")
    return value


def _bad(path: Path, number: int, reason: str) -> NoReturn:
    raise BadTrace(f"{path}:{number}: {reason}")
