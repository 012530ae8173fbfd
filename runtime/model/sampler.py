"""The sampler: what a step's rows ask for becomes arrays, which a set of kernels samples by.

Host work and launches are apart. `plan` makes the arrays; `run` only applies operations of the
kernels (`edit_logits`, `pick_tokens`, `token_logprobs`, all specified in `kernels/reference`). On a
device that runs beside the host, nothing in `run` waits: what depends on a token yet to be found
(`SampleRow.source`) is worked out there, the step of the row's automaton among it; and steps
without lists are launched alike for all rows of a kind, so that a captured graph serves them. On
the host, `sample` does both at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.kernels.interface import (
    Array,
    AutomatonTables,
    Choice,
    HostSampling,
    KernelSet,
    LogitEdits,
    PickRows,
)
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow, TokenScores
from rootlace.wire.sampling import PARAMETERS, TUNED, Parameter, SamplingParams

if TYPE_CHECKING:
    import torch

    from rootlace.runtime.model.automaton_table import AutomatonArena, HostMasks

# Which tokens a sequence has, and how often in its output: what penalties ask at every step.
#
# Counting a sequence anew takes as long as sorting it. Sequences grow, so counts are kept and what
# is new is added; that they are still those of the same sequence is looked at every time.

MAX_SEQUENCES = 1024


@dataclass
class _Counted:
    owner: object
    tokens: np.ndarray  # int32, a copy
    prompt_len: int
    distinct: np.ndarray  # int32, ascending
    counts: np.ndarray  # int32


class SeenTokens:
    """Not thread-safe."""

    def __init__(self, vocab_size: int, max_sequences: int = MAX_SEQUENCES) -> None:
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences
        self._known: OrderedDict[int, _Counted] = OrderedDict()

    def count(
        self, owner: object, token_ids: np.ndarray, prompt_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(distinct tokens of the vocabulary, ascending, how often each is behind `prompt_len`),
        int32. `owner`, an object of the sequence's own, is what it is known by."""
        known = self._known.get(id(owner))
        if known is None or not _begins(known, owner, token_ids, prompt_len):
            known = _Counted(owner, token_ids[:0].copy(), prompt_len, *(np.empty(0, np.int32),) * 2)
            self._known[id(owner)] = known
            if len(self._known) > self._max_sequences:
                self._known.popitem(last=False)
        self._known.move_to_end(id(owner))
        done = len(known.tokens)
        if len(token_ids) > done:
            self._add(known, token_ids[done:prompt_len], counted=False)
            self._add(known, token_ids[max(done, prompt_len) :], counted=True)
            known.tokens = token_ids.copy()
        return known.distinct, known.counts

    def _add(self, known: _Counted, tokens: np.ndarray, counted: bool) -> None:
        if not len(tokens):
            return
        fresh, counts = np.unique(tokens.astype(np.int32), return_counts=True)
        inside = (fresh >= 0) & (fresh < self._vocab_size)
        fresh, counts = fresh[inside], counts[inside].astype(np.int32) * np.int32(counted)
        place = np.searchsorted(known.distinct, fresh)
        there = np.zeros(len(fresh), bool)
        within = place < len(known.distinct)
        there[within] = known.distinct[place[within]] == fresh[within]
        # New arrays: the old ones may be on their way to the device.
        known.counts = known.counts.copy()
        known.counts[place[there]] += counts[there]
        known.distinct = np.insert(known.distinct, place[~there], fresh[~there])
        known.counts = np.insert(known.counts, place[~there], counts[~there])


def _begins(known: _Counted, owner: object, token_ids: np.ndarray, prompt_len: int) -> bool:
    """Whether the sequence begins with what was counted."""
    done = len(known.tokens)
    return (
        known.owner is owner
        and known.prompt_len == prompt_len
        and done <= len(token_ids)
        and np.array_equal(known.tokens, token_ids[:done])
    )


# Row arrays ---------------------------------------------------------------------------------------
#
# What rows ask for, as arrays: how their tokens are drawn, and what changes their logits first.
#
# The arrays are those of `PickRows` and `LogitEdits`, for every set of kernels alike. A sampling
# parameter that acts on logits by a number (`rootlace.wire.sampling` describes each) becomes an
# array of its name. Masks are apart (`sampler.Constraints`): where they lie depends
# on what the kernels read.


Entries = tuple[np.ndarray, np.ndarray]
_NONE: Entries = (np.empty(0, np.int32), np.empty(0, np.float32))
_UNSEEN: Entries = (np.empty(0, np.int32), np.empty(0, np.int32))


def _joined(entries: list[Entries], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start int32 [count + 1], tokens, values) of the rows' entries, for `count` rows, of which
    those behind the given ones have none."""
    start = np.zeros(count + 1, np.int32)
    lengths = [len(tokens) for tokens, _ in entries]
    start[1 : len(entries) + 1] = np.cumsum(lengths)
    start[len(entries) + 1 :] = sum(lengths)
    tokens = np.concatenate([tokens for tokens, _ in entries])
    return start, tokens, np.concatenate([values for _, values in entries])


DRAWN, CUT, BIASED, PENALISED, LOGPROBS = 1, 2, 4, 8, 16
"""What a request asks for, as bits of `flags`."""
MAX_REQUESTS = 4096


_TUNED = [PARAMETERS[name] for name in TUNED]
DRAWS = tuple(p for p in _TUNED if not p.history)
PENALTIES = tuple(p for p in _TUNED if p.history)
"""Neutral at their defaults, but for the temperature, which is neutral (greedy) at 0."""

_RECORD = np.dtype(
    [
        *((p.name, np.float64 if p.type is float else np.int32) for p in (*DRAWS, *PENALTIES)),
        ("seed", np.int64),
        ("flags", np.int32),
    ],
    align=True,
)


class SamplingPlan(msgspec.Struct, frozen=True):
    """Host work of sampling the rows of one step. `arrays` are what is read on the device, whose
    contents differ from step to step; all else says what is launched."""

    arrays: dict[str, np.ndarray]
    choice: Choice
    logprobs: bool
    lists: bool
    """Whether some row has biases, bans or penalties: arrays whose lengths differ."""
    masked: bool = False
    tables: AutomatonTables | None = None
    generation: int = 0

    @property
    def kind(self) -> Hashable | None:
        """Plans of one kind, and for one number of rows, are launched alike on arrays of equal
        shapes: what was captured for one serves the others. None: not to be captured."""
        if self.lists:
            return None  # their lengths differ from step to step
        return self.choice, self.logprobs, self.generation if self.masked else None


class RowArrays:
    """Makes these arrays. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen = SeenTokens(vocab_size)
        self._neutral = self._record(SamplingParams(temperature=0.0, seed=0))[0]
        self._known: dict[int, tuple[SamplingParams, bytes, int]] = {}

    def of(self, rows: Sequence[SampleRow], count: int, bans: bool) -> SamplingPlan:
        """For `count` rows, of which those behind the given ones are empty: greedy, and with their
        logits as they are; without masks. `bans`: banned tokens are listed, not in the masks."""
        records, flags = self._records(rows, count)
        arrays = {p.name: records[p.name] for p in DRAWS}
        arrays["seed"] = records["seed"]
        positions = [len(row.token_ids) + (row.source >= 0) for row in rows]
        arrays["position"] = np.array(positions + [0] * (count - len(rows)), np.int64)
        biased = bool(flags & BIASED) or (bans and any(row.banned for row in rows))
        if biased:
            start, token, bias = _joined([self._biases(row, bans) for row in rows], count)
            arrays |= {"bias_start": start, "bias_token": token, "bias": bias}
        if flags & PENALISED:
            entries = [
                self._seen.count(row.params, row.token_ids, row.prompt_len)
                if own & PENALISED
                else _UNSEEN
                for row, own in zip(rows, records["flags"].tolist(), strict=False)
            ]
            start, token, seen = _joined(entries, count)
            arrays |= {"seen_start": start, "seen_token": token, "seen_count": seen}
            arrays |= {p.name: records[p.name] for p in PENALTIES}
        lists = biased or bool(flags & PENALISED)
        choice: Choice = "cut" if flags & CUT else "random" if flags & DRAWN else "greedy"
        return SamplingPlan(arrays, choice, bool(flags & LOGPROBS), lists)

    def _biases(self, row: SampleRow, bans: bool) -> Entries:
        """A row's biases, and its bans if they are to be listed. Ids outside the vocabulary are
        left out."""
        entries = dict(row.params.logit_bias)
        if bans:
            entries.update(dict.fromkeys(row.banned, -np.inf))
        if not entries:
            return _NONE
        tokens = sorted(token for token in entries if 0 <= token < self._vocab_size)
        return np.array(tokens, np.int32), np.array([entries[t] for t in tokens], np.float32)

    def _records(self, rows: Sequence[SampleRow], count: int) -> tuple[np.ndarray, int]:
        """([count]: each row's parameters, by name, and its `flags`; what any of them asks for).
        They are worked out once per request, not per step."""
        parts, asked = [self._neutral] * count, 0
        for i, row in enumerate(rows):
            _, parts[i], flags = self._of(row.params)
            asked |= flags
        return np.frombuffer(bytearray().join(parts), _RECORD), asked

    def flags(self, params: SamplingParams) -> int:
        """What a request asks for."""
        return self._of(params)[2]

    def _of(self, params: SamplingParams) -> tuple[SamplingParams, bytes, int]:
        known = self._known
        found = known.get(id(params))
        if found is None or found[0] is not params:
            if len(known) >= MAX_REQUESTS:
                known.clear()
            found = known[id(params)] = params, *self._record(params)
        return found

    def _record(self, params: SamplingParams) -> tuple[bytes, int]:
        """(the request's record, its flags)"""
        draws = [self._value(p, getattr(params, p.name)) for p in DRAWS]
        penalties = [self._value(p, getattr(params, p.name)) for p in PENALTIES]
        flags = 0
        if params.temperature > 0:
            flags |= DRAWN
            cuts = zip(DRAWS, draws, strict=True)
            if any(p.name != "temperature" and v != self._value(p, p.default) for p, v in cuts):
                flags |= CUT
        if params.logit_bias:
            flags |= BIASED
        if any(v != p.default for p, v in zip(PENALTIES, penalties, strict=True)):
            flags |= PENALISED
        if params.logprobs:
            flags |= LOGPROBS
        seed = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        seed -= (seed >> 63) << 64
        return np.array([(*draws, *penalties, seed, flags)], _RECORD).tobytes(), flags

    def _value(self, parameter: Parameter, value: float) -> float:
        """What kernels are told: of a number of tokens, at most how many there are (off)."""
        if parameter.type is not int:
            return value
        return min(value, self._vocab_size) if value > 0 else self._vocab_size


# Scores -------------------------------------------------------------------------------------------
#
# Log-probabilities of given tokens and of the best alternatives, from raw logits.


LOGITS_BYTES = 64 << 20
"""Logits of scored tokens held at once; more tokens are scored in parts of this size."""
PART_TOKENS = 256
"""With a large vocabulary, parts have as many tokens as this, unless their logits take more than
four times `LOGITS_BYTES`: each part reads the whole output head again, which counts where tokens
are few."""


def score_in_parts(
    score: Callable[..., Any],
    logits: Callable[[slice], Any],
    tokens: Any,
    top: int,
    vocab_size: int,
    join: Callable[[list[Any]], Any] = np.concatenate,
) -> tuple[Any, Any, Any]:
    """`score` of N > 0 tokens, of whose logits it asks for a part at a time, so that memory does
    not grow with N. `join`: puts parts of its arrays together."""
    row = 4 * vocab_size
    size = max(LOGITS_BYTES // row, min(PART_TOKENS, 4 * LOGITS_BYTES // row), 1)
    count = len(tokens)
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    found = [score(logits(part), tokens[part], top) for part in parts]
    if len(found) > 1:
        found = [tuple(join(list(each)) for each in zip(*found, strict=True))]
    logprobs, ids, top_logprobs = found[0]
    return logprobs, ids, top_logprobs


def of_samples(
    rows: Sequence[SampleRow],
    logprobs: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> list[TokenScores | None]:
    """The scores of those rows that ask for them, of arrays that have all rows'."""
    return [
        _part(logprobs, top_ids, top_logprobs, slice(i, i + 1), row.params.top_logprobs)
        if row.params.logprobs
        else None
        for i, row in enumerate(rows)
    ]


def of_prompts(
    rows: Sequence[PromptScoreRow],
    logprobs: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> list[TokenScores]:
    """The scores of each row's targets, of arrays that have all rows' one behind the other."""
    scores = []
    start = 0
    for row in rows:
        here = slice(start, start + len(row.targets))
        scores.append(_part(logprobs, top_ids, top_logprobs, here, row.top_logprobs))
        start = here.stop
    return scores


def _part(
    logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, row: slice, top: int
) -> TokenScores:
    return TokenScores(logprobs[row], top_ids[row, :top], top_logprobs[row, :top])


# Sampler ------------------------------------------------------------------------------------------


_LISTS = ("bias_start", "bias_token", "bias", "seen_start", "seen_token", "seen_count")


Constraints: TypeAlias = "HostMasks | AutomatonArena"
"""Where masks lie that kernels read: in main memory, where a step's masks are one table, or on a
device, where they stay between steps together with the automata that it steps by itself."""


class Sampler:
    """Samples one token per row. Not thread-safe."""

    def __init__(
        self, vocab_size: int, kernels: KernelSet | HostSampling, constraints: Constraints
    ) -> None:
        self._kernels = kernels
        self._constraints = constraints
        self._rows = RowArrays(vocab_size)

    def plan(self, rows: Sequence[SampleRow], count: int) -> SamplingPlan:
        """For `count` rows, of which those behind the given ones are empty. To be called where the
        step is launched: masks and automata that are not on the device yet are sent there.

        Raises RuntimeError if a row's mask is not filled.
        """
        constraints = self._constraints
        plan = self._rows.of(rows, count, not constraints.bans)
        masked = any(
            row.mask is not None or row.automaton is not None or (constraints.bans and row.banned)
            for row in rows
        )
        if masked:
            plan.arrays.update(constraints.arrays(rows, count))
        return replace(
            plan, masked=masked, tables=constraints.tables, generation=constraints.generation
        )

    def plan_like(self, plan: SamplingPlan, count: int) -> SamplingPlan:
        """For `count` empty rows, launched as `plan` is, which is of a kind."""
        arrays = self._rows.of([], count, bans=False).arrays
        if plan.masked:
            arrays |= self._constraints.arrays([], count)
        return replace(plan, arrays=arrays)

    def run(
        self,
        plan: SamplingPlan,
        logits: Array,
        arrays: dict[str, Array],
        tokens: Array,
        logprobs: torch.Tensor | None = None,
    ) -> None:
        """logits float32 or bfloat16 [count, V], not changed -> the first `count` of `tokens` int32
        (-1: the row has no distribution) and, where a row asks for it, of `logprobs` float32.

        Before, `tokens` holds what the step before found: `SampleRow.source` is an index into it.
        Only launches: may be captured.
        """
        count = len(logits)
        table, rows = self._masks(plan, arrays, tokens)
        edited = logits
        if plan.lists:
            lists = {name: arrays[name] for name in _LISTS if name in arrays}
            penalties = {p.name: arrays[p.name] for p in PENALTIES if p.name in arrays}
            edits = LogitEdits(mask_table=table, mask_row=rows, penalties=penalties, **lists)
            edited = self._kernels.edit_logits(logits, edits)
            table = rows = None
        params = {p.name: arrays[p.name] for p in DRAWS}
        picked = PickRows(params, arrays["seed"], arrays["position"], table, rows)
        self._kernels.pick_tokens(edited, picked, plan.choice, tokens[:count])
        if plan.logprobs and logprobs is not None:
            assert isinstance(self._kernels, KernelSet)
            self._kernels.token_logprobs(logits, tokens[:count], logprobs[:count])

    def _masks(
        self, plan: SamplingPlan, arrays: dict[str, Array], tokens: Array
    ) -> tuple[Array | None, Array | None]:
        """(table of masks, each row's place in it)."""
        if not plan.masked:
            return None, None
        if plan.tables is None:
            return arrays["mask_table"], arrays["mask_row"]
        assert isinstance(self._kernels, KernelSet)
        _, rows = self._kernels.step_automata(
            arrays["state"], arrays["source"], tokens, arrays["mask_row"], plan.tables
        )
        return plan.tables.masks, rows

    # ------------------------------------------------------------ on the host

    def takes_best(self, rows: Sequence[SampleRow]) -> bool:
        """Whether each row asks for nothing but the best token that its mask and its bans leave,
        and for no score of it."""
        flags = self._rows.flags
        return all(not row.params.logprobs if row.simple else not flags(row.params) for row in rows)

    def sample(self, logits: np.ndarray, rows: Sequence[SampleRow]) -> np.ndarray:
        """`plan` and `run` at once: logits float32 [len(rows), V], not changed -> int32.

        Logits that a row's mask excludes may be anything.
        """
        plan = self.plan(rows, len(rows))
        tokens = np.empty(len(rows), np.int32)
        self.run(plan, logits, plan.arrays, tokens)
        return tokens
