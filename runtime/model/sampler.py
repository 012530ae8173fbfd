"""Turn the rows' sampling parameters into arrays, and sample with a set of kernels.

Host work and launches are apart. `plan` makes the arrays; `run` only applies operations of the
kernels (`edit_logits`, `pick_tokens`, `token_logprobs`, all specified in `kernels/reference`). On a
device beside the host, nothing in `run` waits. Work that depends on a token not found yet
(`SampleRow.source`) runs on the device, the automaton's step included. Steps without lists are
launched alike for all rows of a kind, so that a captured graph serves them. On the host, `sample`
does both at once.
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

# Count a sequence's tokens, and their repetitions in its output: penalties need both at every step.
#
# Counting a sequence anew takes as long as sorting it. Sequences grow, so counts are kept and new
# tokens are added; each call checks that the sequence still begins with the counted tokens.

MAX_SEQUENCES = 1024


@dataclass
class _Counted:
    owner: object
    tokens: np.ndarray  # int32, a copy
    prompt_len: int
    distinct: np.ndarray  # int32, ascending
    counts: np.ndarray  # int32


class SeenTokens:
    """Counts of the tokens in sequences. Not thread-safe."""

    def __init__(self, vocab_size: int, max_sequences: int = MAX_SEQUENCES) -> None:
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences
        self._known: OrderedDict[int, _Counted] = OrderedDict()

    def count(
        self, owner: object, token_ids: np.ndarray, prompt_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (distinct tokens of the vocabulary, ascending; count of each behind `prompt_len`),
        int32. `owner`: an object that identifies the sequence."""
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
    """Tell whether the sequence begins with the counted tokens."""
    done = len(known.tokens)
    return (
        known.owner is owner
        and known.prompt_len == prompt_len
        and done <= len(token_ids)
        and np.array_equal(known.tokens, token_ids[:done])
    )


# Row arrays ---------------------------------------------------------------------------------------
#
# Build arrays of the rows' parameters: for drawing tokens, and for changing logits before.
#
# The arrays are those of `PickRows` and `LogitEdits`, for every set of kernels alike. A sampling
# parameter that acts on logits by a number (`rootlace.wire.sampling` describes each) becomes an
# array of its name. Masks are separate (`sampler.Constraints`): their place depends
# on what the kernels read.


Entries = tuple[np.ndarray, np.ndarray]
_NONE: Entries = (np.empty(0, np.int32), np.empty(0, np.float32))
_UNSEEN: Entries = (np.empty(0, np.int32), np.empty(0, np.int32))


def _joined(entries: list[Entries], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join the rows' entries: (start int32 [count + 1], tokens, values). Rows up to `count` behind
    the given ones have no entries."""
    start = np.zeros(count + 1, np.int32)
    lengths = [len(tokens) for tokens, _ in entries]
    start[1 : len(entries) + 1] = np.cumsum(lengths)
    start[len(entries) + 1 :] = sum(lengths)
    tokens = np.concatenate([tokens for tokens, _ in entries])
    return start, tokens, np.concatenate([values for _, values in entries])


DRAWN, CUT, BIASED, PENALISED, LOGPROBS = 1, 2, 4, 8, 16
"""Bits of `flags`: a request's kinds of sampling work."""
MAX_REQUESTS = 4096


_TUNED = [PARAMETERS[name] for name in TUNED]
DRAWS = tuple(p for p in _TUNED if not p.history)
PENALTIES = tuple(p for p in _TUNED if p.history)
"""Neutral at their defaults, except the temperature, which is neutral (greedy) at 0."""

_RECORD = np.dtype(
    [
        *((p.name, np.float64 if p.type is float else np.int32) for p in (*DRAWS, *PENALTIES)),
        ("seed", np.int64),
        ("flags", np.int32),
    ],
    align=True,
)


class SamplingPlan(msgspec.Struct, frozen=True):
    """Host work of sampling the rows of one step. `arrays` are read on the device, and their
    contents differ from step to step; all other fields decide the launches."""

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
        """Kind of the plan: plans of one kind and number of rows are launched alike on arrays of
        equal shapes, so that one capture serves all. None: not to be captured."""
        if self.lists:
            return None  # lengths of lists differ from step to step
        return self.choice, self.logprobs, self.generation if self.masked else None


class RowArrays:
    """Builder of the sampling arrays. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen = SeenTokens(vocab_size)
        self._neutral = self._record(SamplingParams(temperature=0.0, seed=0))[0]
        self._known: dict[int, tuple[SamplingParams, bytes, int]] = {}

    def of(self, rows: Sequence[SampleRow], count: int, bans: bool) -> SamplingPlan:
        """Build the arrays for `count` rows, without masks. Rows behind the given ones are empty:
        greedy, with unchanged logits. `bans`: banned tokens are listed, not in the masks."""
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
        """Return a row's biases, and its bans if they are to be listed. Ids outside the vocabulary
        are left out."""
        entries = dict(row.params.logit_bias)
        if bans:
            entries.update(dict.fromkeys(row.banned, -np.inf))
        if not entries:
            return _NONE
        tokens = sorted(token for token in entries if 0 <= token < self._vocab_size)
        return np.array(tokens, np.int32), np.array([entries[t] for t in tokens], np.float32)

    def _records(self, rows: Sequence[SampleRow], count: int) -> tuple[np.ndarray, int]:
        """Return each row's parameters by name, with its `flags` ([count]), and all flags together.
        Parameters are encoded once per request, not per step."""
        parts, seen = [self._neutral] * count, 0
        for i, row in enumerate(rows):
            _, parts[i], flags = self._of(row.params)
            seen |= flags
        return np.frombuffer(bytearray().join(parts), _RECORD), seen

    def flags(self, params: SamplingParams) -> int:
        """Return the flags of a request."""
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
        """Return (the request's record, its flags)."""
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
        """Return a value for kernels: a number of tokens is at most the vocabulary (off)."""
        if parameter.type is not int:
            return value
        return min(value, self._vocab_size) if value > 0 else self._vocab_size


# Scores -------------------------------------------------------------------------------------------
#
# Compute log-probabilities of given tokens and of the best alternatives, from raw logits.


LOGITS_BYTES = 64 << 20
"""Bytes of logits of scored tokens held at once; more tokens are scored in several parts."""
PART_TOKENS = 256
"""Tokens of a part, unless their logits take over four times `LOGITS_BYTES`. Each part reads the
whole output head again, which matters for few tokens."""


def score_in_parts(
    score: Callable[..., Any],
    logits: Callable[[slice], Any],
    tokens: Any,
    top: int,
    vocab_size: int,
    join: Callable[[list[Any]], Any] = np.concatenate,
) -> tuple[Any, Any, Any]:
    """Apply `score` to N > 0 tokens, in parts of their logits, so that memory does not grow with N.
    `join`: joins the parts of an array."""
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
    rows: Sequence[SampleRow], logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> list[TokenScores | None]:
    """Pick the scores of the rows that ask for scores, from arrays of all rows."""
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
    """Cut the scores of each row's targets from the joined arrays of all rows."""
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
"""Holder of the masks that kernels read. `HostMasks`: in main memory, one table for a step's masks.
`AutomatonArena`: on a device, kept between steps, with the automata that the device steps."""


class Sampler:
    """Sampler of one token per row. Not thread-safe."""

    def __init__(
        self, vocab_size: int, kernels: KernelSet | HostSampling, constraints: Constraints
    ) -> None:
        self._kernels = kernels
        self._constraints = constraints
        self._rows = RowArrays(vocab_size)

    def plan(self, rows: Sequence[SampleRow], count: int) -> SamplingPlan:
        """Plan `count` rows, of which those behind the given ones are empty. Call in the context of
        the launch: missing masks and automata are sent to the device.

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
        """Plan `count` empty rows, launched like `plan`, which has a kind."""
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
        """Sample from logits, float32 or bfloat16 [count, V], not changed, into the first `count`
        of `tokens`, int32 (-1: no distribution); if requested, write `logprobs`, float32.

        Before, `tokens` holds the tokens of the step before: `SampleRow.source` indexes them. Only
        launches: may be captured.
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
        """Return (table of masks, each row's place in the table)."""
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
        """Tell whether each row only needs the best token that its mask and its bans allow, without
        scores."""
        flags = self._rows.flags
        return all(not row.params.logprobs if row.simple else not flags(row.params) for row in rows)

    def sample(self, logits: np.ndarray, rows: Sequence[SampleRow]) -> np.ndarray:
        """Plan and run at once: logits float32 [len(rows), V], not changed -> tokens int32. Logits
        that a row's mask excludes may have any value."""
        plan = self.plan(rows, len(rows))
        tokens = np.empty(len(rows), np.int32)
        self.run(plan, logits, plan.arrays, tokens)
        return tokens
