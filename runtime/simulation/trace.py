"""Request traces as files: Mooncake's JSON lines and Azure's CSV, plain or gzipped; recorded texts.

Texts are replayed through the drafter, which shows what drafts from the cache would save:

{"input_ids": [5, 9, 2], "output_ids": [9, 2, 7]}     a request per line, in order of arrival
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import msgspec
import numpy as np

from rootlace.runtime.cache.suffix_index import SuffixIndex
from rootlace.runtime.config import SPECULATION_TOKENS
from rootlace.runtime.scheduler.drafter import Drafter, Recalled
from rootlace.runtime.scheduler.speculation import DOUBT, LEARNT_AT_ONCE
from rootlace.wire.protocol import DRAFT_SOURCES

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's `hash_ids` stands for."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class _Mooncake(msgspec.Struct):
    """A line of Mooncake's; `timestamp` in milliseconds."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Positive
    output_length: _NotNegative
    hash_ids: list[int]


class _AzureCounts(msgspec.Struct):
    ContextTokens: _Positive
    GeneratedTokens: _NotNegative


class _Recorded(msgspec.Struct):
    input_ids: Annotated[list[_NotNegative], msgspec.Meta(min_length=1)]
    output_ids: list[_NotNegative]


class BadTrace(ValueError):
    """A trace that cannot be read; the message names file and line."""


class Trace(msgspec.Struct, frozen=True, dict=True):
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
    hashes: list[int]


def read_trace(path: Path) -> Trace:
    """Read a trace, in the format that its first line shows. Raises BadTrace with file and line of
    the fault, OSError if the file cannot be read."""
    lines = ((number, line) for number, line in enumerate(lines_of(path), 1) if line.strip())
    number, line = next(lines, (0, ""))
    if not number:
        raise BadTrace(f"{path} is empty")
    if line.lstrip().startswith("{"):
        rows = list(_mooncake(path, chain([(number, line)], lines)))
        return _assemble(path, "mooncake", rows, MOONCAKE_BLOCK)
    header = [column.strip() for column in next(csv.reader([line]))]
    if not set(_AZURE_COLUMNS) <= set(header):
        bad(path, number, f"neither a JSON object nor a header with {', '.join(_AZURE_COLUMNS)}")
    rows = list(_azure(path, header, lines))
    return _assemble(path, "azure", rows, max((row.prompt for row in rows), default=1))


def lines_of(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    number = 0
    with gzip.open(path) if packed else path.open("rb") as opened:
        try:
            for raw in opened:
                number += 1
                yield raw.decode().removeprefix("\ufeff")
        except UnicodeDecodeError:
            bad(path, number, "not UTF-8")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            bad(path, number + 1, f"not gzip from here on: {error}")


def _mooncake(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    for number, line in lines:
        row = _decoded(path, number, line, _Mooncake)
        prompt, hashes = row.input_length, row.hash_ids
        blocks = -(-prompt // MOONCAKE_BLOCK)
        if len(hashes) != blocks:
            bad(path, number, f"{prompt} tokens are {blocks} blocks, hash_ids has {len(hashes)}")
        yield _Row(row.timestamp / 1000, prompt, row.output_length, hashes)


def _decoded(path: Path, number: int, line: str, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        bad(path, number, str(error))


def _azure(path: Path, header: list[str], lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    where = [header.index(column) for column in _AZURE_COLUMNS]
    first: datetime | None = None
    for number, line in lines:
        fields = next(csv.reader([line]))
        if len(fields) != len(header):
            bad(path, number, f"{len(fields)} fields, the header has {len(header)}")
        stamp, prompt, output = (fields[at].strip() for at in where)
        try:
            time = datetime.fromisoformat(stamp)
        except ValueError:
            bad(path, number, f"TIMESTAMP must be a date and time, not {stamp!r}")
        first = first or time
        try:
            seconds = (time - first).total_seconds()
        except TypeError:
            bad(path, number, "TIMESTAMP has a time zone, or has none, unlike the lines before")
        try:
            columns = dict(zip(_AZURE_COLUMNS[1:], (prompt, output), strict=True))
            counts = msgspec.convert(columns, _AzureCounts, strict=False)
        except msgspec.ValidationError as error:
            bad(path, number, str(error))
        # The trace has no contents of prompts: each prompt is one block of its own.
        yield _Row(seconds, counts.ContextTokens, counts.GeneratedTokens, [number])


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
    """Give each distinct prefix one id. A file's ids may depend on a block's tokens alone, not on
    the tokens before it; equal ids of a last block count only at equal length."""
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


def bad(path: Path, number: int, reason: str) -> NoReturn:
    raise BadTrace(f"{path}:{number}: {reason}")


# Workload -----------------------------------------------------------------------------------------
#
# A trace as the requests of one run: repeated, sped up, in units of several tokens.


SHARED_BY = 0.01
"""A block that at least this part of a trace's requests begins with is shared by all its copies."""

FIRST_OUTPUT = 1 << 30
"""Units from here on are outputs: one id per request, so nothing ever matches them."""


class Load(msgspec.Struct, frozen=True):
    """Load of a replay. `rate` divides the time between arrivals.

    The trace is played `repeat` times, one after the other, or as often as `requests` takes. A copy
    begins one mean gap after the last arrival of the copy before. Copies have their own blocks,
    except blocks in at least 1 % of the trace's requests (system prompts), which all copies share.
    `granularity` is the number of tokens in a unit: scheduler and tree count units in place of
    tokens.
    """

    rate: float = 1.0
    repeat: int = 1
    requests: int | None = None
    granularity: int = 16


class Workload:
    """The requests of a run, each made on demand.

    Arrays over all requests: `arrivals` (seconds), `prompt_units`, `outputs` (tokens, at least 1).
    A prompt's units are rounded up. The first unit of a block has the block's number and the others
    are 0, so two prompts agree exactly as far as their blocks do.
    """

    def __init__(self, trace: Trace, load: Load) -> None:
        """Raises ValueError where the load does not fit the trace."""
        size = len(trace)
        if load.granularity < 1 or load.repeat < 1:
            raise ValueError("granularity and repeat must be positive")
        if not (math.isfinite(load.rate) and load.rate > 0):
            raise ValueError(f"the rate must be a positive number, not {load.rate}")
        if trace.format == "mooncake" and trace.block_tokens % load.granularity:
            raise ValueError(
                f"the granularity must divide the trace's blocks of {trace.block_tokens} tokens, "
                f"which {load.granularity} does not"
            )
        count = load.requests if load.requests is not None else size * load.repeat
        if count < 1:
            raise ValueError("at least one request is needed")
        self.trace = trace
        self.load = load
        self.granularity = load.granularity
        copies = -(-count // size)
        if copies * trace.num_blocks >= FIRST_OUTPUT or FIRST_OUTPUT + count >= 2**31 - 1:
            raise ValueError(f"{count} requests have more blocks than there are ids")
        self._block_units = -(-trace.block_tokens // load.granularity)
        span = float(trace.arrivals[-1]) * size / max(size - 1, 1)
        which = np.arange(count) // size
        within = np.arange(count) % size
        self.arrivals = (which * span + trace.arrivals[within]) / load.rate
        self.prompt_units = -(-trace.prompt_tokens // load.granularity)[within]
        self.outputs = np.maximum(trace.output_tokens, 1)[within]
        self._private = _private(trace)

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def output_units(self) -> np.ndarray:
        """The first unit is one token: it is there with the prompt's last one."""
        return 1 + -(-(self.outputs - 1) // self.granularity)

    def fitting(self, cache_units: int) -> np.ndarray:
        """Numbers of the requests that fit into a cache of `cache_units` units, alone and to their
        end. Their last unit needs no room: nothing comes after it."""
        return np.flatnonzero(self.prompt_units + self.output_units - 1 <= cache_units)

    def blocks(self, index: int) -> np.ndarray:
        """int64 ids of the blocks of request `index`."""
        copy, within = divmod(index, len(self.trace))
        span = slice(self.trace.starts[within], self.trace.starts[within + 1])
        blocks = self.trace.blocks[span]
        if not copy:
            return blocks
        return blocks + self._private[span] * (copy * self.trace.num_blocks)

    def prompt(self, index: int) -> np.ndarray:
        """int32 units of request `index`."""
        units = np.zeros(self.prompt_units[index], np.int32)
        units[:: self._block_units] = self.blocks(index) + 1
        return units

    def all_blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the blocks of all requests in one array, their sizes in units (both int32: there
        are many), and where each request starts there."""
        trace, size = self.trace, len(self.trace)
        counts = np.diff(trace.starts)
        units = np.full(len(trace.blocks), self._block_units, np.int32)
        units[trace.starts[1:] - 1] = (
            -(-trace.prompt_tokens // self.granularity) - (counts - 1) * self._block_units
        )
        copies = -(-len(self) // size)
        starts = np.concatenate(([0], np.cumsum(np.tile(counts, copies)[: len(self)])))
        shift = np.arange(copies, dtype=np.int32)[:, None] * (
            self._private * np.int32(trace.num_blocks)
        )
        shift += trace.blocks.astype(np.int32)
        blocks = shift.reshape(-1)[: starts[-1]]
        return blocks, np.tile(units, copies)[: starts[-1]], starts


def _private(trace: Trace) -> np.ndarray:
    """bool per entry of `trace.blocks`: whether a copy of the trace has a block of its own there.
    (No request has a block twice.)"""
    uses = np.bincount(trace.blocks)
    private: np.ndarray = (uses < max(SHARED_BY * len(trace), 2))[trace.blocks]
    return private


DRAFT_PRICES = (0.05, 0.1, 0.2, 0.3)
"""Costs of a drafted token, as parts of a step of one row."""
Texts = list[tuple[np.ndarray, int]]
"""Each request's prompt with output (int32), and the length of the prompt."""


def is_recorded(path: Path) -> bool:
    """Return whether the first line of a file has texts. Raises OSError, BadTrace."""
    first = next((line for line in lines_of(path) if line.strip()), "")
    try:
        return "output_ids" in msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return False


def read_recorded(path: Path) -> Texts:
    """Raises BadTrace with file and line of the fault, OSError if the file cannot be read."""
    texts: Texts = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        one = _decoded(path, number, line, _Recorded)
        texts.append((np.array([*one.input_ids, *one.output_ids], np.int32), len(one.input_ids)))
    if not texts:
        raise BadTrace(f"{path} has no requests")
    return texts


class Drafted(msgspec.Struct, frozen=True):
    """Savings of drafts at a price: `speedup` counts decode steps alone, one request at a time.
    `right` and `wrong`: drafted tokens by source."""

    price: float
    tokens: int
    steps: int
    speedup: float
    right: dict[str, int]
    wrong: dict[str, int]


def replay_texts(texts: Texts, price: float, capacity: int = SPECULATION_TOKENS) -> Drafted:
    """Decode the outputs one after another, with an index of `capacity` tokens."""
    recalled = Recalled(SuffixIndex(capacity))
    right, wrong = (dict.fromkeys(DRAFT_SOURCES, 0) for _ in range(2))
    tokens, steps, seconds = 0, 0, 0.0
    for text, prompt in texts:
        indexed = recalled.index.open("", text[:prompt])
        drafter = Drafter(None, prompt, recalled, indexed)
        length, tokens = prompt, tokens + len(text) - prompt
        while length < len(text):
            # The first token comes of the prefill.
            count = drafter.worth(price + DOUBT)[0] if length > prompt else 0
            draft = drafter.draft(min(count, len(text) - length - 1))
            same = np.array(draft, np.int32) == text[length : length + len(draft)]
            agreed = len(draft) if same.all() else int(same.argmin())
            if length > prompt:
                steps, seconds = steps + 1, seconds + 1 + price * len(draft)
            if draft:
                source = DRAFT_SOURCES[drafter.source]
                right[source] += agreed
                wrong[source] += len(draft) - agreed
                drafter.drafted(agreed, (price + DOUBT) * len(draft))
            length += agreed + 1
            drafter.follow(text, length)
            if length - indexed.known >= LEARNT_AT_ONCE:
                recalled.index.learn(indexed, text[indexed.known : length])
                if not indexed.number:  # the index has dropped it
                    drafter.indexed = None
        recalled.index.learn(indexed, text[indexed.known :])
    plain = sum(max(len(text) - prompt - 1, 0) for text, prompt in texts)
    return Drafted(price, tokens, steps, plain / seconds if seconds else 1.0, right, wrong)
