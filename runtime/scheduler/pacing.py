"""Measured times: cost of steps, what fits into one, pace of prefill, duration of requests."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median

import numpy as np

from rootlace.runtime.contracts.plan import PRIOR, StepCost, StepPlan
from rootlace.runtime.scheduler.request import RequestState, Work

BY_ORDER = attrgetter("order")

# Measured cost of steps ---------------------------------------------------------------------------


_PARTS = ("step", "prefill", "decode", "context", "pair", "score")
"""The coefficients of `StepCost`."""
_STEPS_KEPT = 0.99
"""Weight of the older steps beside the next one."""
_FIRST_STEPS, _FIRST_KEPT = 4, 0.5
"""The first steps load what they need, so they are soon forgotten: so many, and their weight."""
_FIRST_WEIGHT = 0.5
"""Weight of the prior besides, divided by the steps: a few steps tell little of what makes them."""
_LARGEST_KEPT = 0.9
_FARTHEST = 2.0
_SOLVED_AFTER = 8
"""Steps after which coefficients are found again, at the latest; sooner among the first ones."""
_SURPRISE, _LONG = 1.25, 0.02
"""Coefficients are found again behind a step that had so many times the prompt tokens of those
before, and took so many seconds: what comes next is as large. Finding takes 0.1 ms."""
_PRIOR_WEIGHT = 1e-3
"""Weight of the prior, scaled to the measured times, beside the steps."""
_LEVEL_OF, _LEVEL_MOST = 3, 8.0
"""A level is the median of so many steps, and at most so many times above or below 1."""


class MeasuredCost:
    """Least squares over recent steps with nonnegative coefficients.

    Each step is weighed by its forecast, so that a relative error counts the same in short and long
    steps. A step counts as at most `_FARTHEST` times slower or faster than its forecast: one that
    stood still with the machine is no measure. Where the steps do not separate the coefficients,
    `PRIOR` does.

    The coefficients learn slowly, for example at the first prompt after hours of decoding. So there
    are two *levels*, for steps with prompts and for the others: how many times longer the last
    three took than the coefficients say (the median).
    """

    def __init__(self, max_step_tokens: int) -> None:
        prior = self.cost = replace(PRIOR, max_step_tokens=max_step_tokens)
        """As of the coefficients found last."""
        self._units = np.array([getattr(prior, name) for name in _PARTS])
        self._products = np.zeros((len(_PARTS), len(_PARTS)))
        self._sums = np.zeros(len(_PARTS))
        self._solution = np.ones(len(_PARTS))
        """The coefficients in units of the prior."""
        self._recent: list[deque[tuple[np.ndarray, float]]] = [
            deque(maxlen=_LEVEL_OF) for _ in range(2)
        ]
        """Work in units of the prior, and seconds, of the last steps without prompts and with."""
        self.levels = [1.0, 1.0]
        """Of the steps without prompts and with."""
        self.steps = 0
        self.largest = 0.0
        """Prompt tokens of the largest step lately."""
        self._solved = 0
        """Steps of which the coefficients are."""

    def note(self, work: Work, seconds: float) -> None:
        """Record the duration of a step."""
        seconds = max(seconds, 1e-6)
        unlike = work[1] > _SURPRISE * self.largest and seconds > _LONG
        if work[1]:
            self.largest = max(work[1], _LARGEST_KEPT * self.largest)
        parts, kind = self._units * work, int(work[1] > 0)
        self._recent[kind].append((parts, seconds))
        expected = float(parts @ self._solution) if self.steps else 0.0
        if expected < 1e-3 * seconds:  # no step before had such work
            expected = seconds
        self.steps += 1
        parts = parts / expected
        kept = _STEPS_KEPT if self.steps > _FIRST_STEPS else _FIRST_KEPT
        self._products = kept * self._products + np.outer(parts, parts)
        ratio = min(max(seconds / expected, 1 / _FARTHEST), _FARTHEST)
        self._sums = kept * self._sums + parts * ratio
        due = self._solved + min(self.steps // _SOLVED_AFTER, _SOLVED_AFTER)
        if unlike or self.steps >= due:
            self._solve()
            self._find_level(1 - kind)
        self._find_level(kind)

    def _find_level(self, kind: int) -> None:
        recent = self._recent[kind]
        if len(recent) == _LEVEL_OF:
            slower = [each / max(float(one @ self._solution), 1e-9) for one, each in recent]
            self.levels[kind] = min(max(median(slower), 1 / _LEVEL_MOST), _LEVEL_MOST)

    def forecast(self, plan: StepPlan) -> tuple[Work, float]:
        """The work of a step, and the seconds that it should take; 0 while nothing was measured."""
        counts = np.diff(plan.row_start)
        prompts = counts > 1
        chunks, ends = counts[prompts].astype(np.float64), plan.context_len[prompts]
        work = (
            1.0,
            float(chunks.sum()),
            len(counts) - len(chunks),
            float(plan.context_len[~prompts].sum()),
            float(np.dot(chunks, ends - chunks / 2)),
            sum(len(row.targets) for row in plan.prompt_scores) if plan.prompt_scores else 0,
        )
        if not self.steps:
            return work, 0.0
        return work, float((self._units * work) @ self._solution) * self.levels[work[1] > 0]

    def _solve(self) -> None:
        # Factor by which the prior as a whole is too low.
        scale = self._sums.sum() / self._products.sum()
        weight = _PRIOR_WEIGHT + _FIRST_WEIGHT / self.steps
        weights = weight * np.maximum(np.diag(self._products), 1e-12)
        products = self._products + np.diag(weights)
        sums = self._sums + weights * scale
        solution, known = np.zeros(len(_PARTS)), np.ones(len(_PARTS), bool)
        while known.any():
            solution[:] = 0.0
            solution[known] = np.linalg.solve(products[np.ix_(known, known)], sums[known])
            if (solution >= 0).all():
                break
            known &= solution > 0
        if not solution[:2].any():
            solution[0] = 1.0
        self._solution, self._solved = solution, self.steps
        found = dict(zip(_PARTS, (solution * self._units).tolist(), strict=True))
        self.cost = replace(self.cost, **found, source="measured as it runs")


# Time of a step -----------------------------------------------------------------------------------


_LEAST_CHUNK = 32
"""Tokens that a step computes of a prompt, whatever they cost. To read the weights once takes as
long as to compute some 5 tokens on a CPU, so a large model spends little of its time on that."""
_FIRST_CHUNK = 64
"""Tokens of the first step, when nothing is measured. Later ones have at most twice as many as the
largest lately, so that no forecast goes far beyond what it follows from."""
_LENGTH = attrgetter("length")
_AIMED = 0.95
"""Share of a step's bound that a step is planned to take: forecasts miss by some 5 %."""
LEAST = 0.25
"""Share of a step's bound that prompts have beside any decode rows."""
_ROWS_TO_STEP = 20
"""Decode rows take turns if they take longer than so many empty steps: turns cost 5 to 10 %."""


@dataclass(slots=True)
class Turns:
    """Decode rows that take longer than `limit` seconds by `measured` take turns in equal parts."""

    limit: float
    measured: MeasuredCost
    last: int = -1
    """Admission number of the row that decoded last."""

    def part(self, rows: list[RequestState], prompts: bool) -> list[RequestState]:
        """The rows of the next step, of all in order of admission, the first in turn first.

        Where there are `prompts` to compute, too, a part of each step is left for these.
        """
        cost = self.measured.cost
        limit = self.limit * (1 - LEAST if prompts else 1) / self.measured.levels[prompts]
        decoding = cost.decode * len(rows) + cost.context * sum(map(_LENGTH, rows))
        parts = math.ceil(decoding / max(limit - cost.step, _ROWS_TO_STEP * cost.step))
        if parts < 2 or not self.measured.steps:
            return rows
        at = bisect_right(rows, self.last, key=BY_ORDER)
        return (rows[at:] + rows[:at])[: -(-len(rows) // parts)]


@dataclass(slots=True)
class StepBudget:
    """What a step may still compute of prompts: `tokens`, which cost `seconds` by `cost`.

    The level of steps with prompts is in `seconds`, not in `cost`. `cost` None: the tokens alone
    are bounded.
    """

    tokens: int
    seconds: float = math.inf
    cost: StepCost | None = None

    @property
    def open(self) -> bool:
        """Whether another token fits."""
        return self.tokens > 0 and self.seconds > 0

    @classmethod
    def of(
        cls, tokens: int, limit: float, measured: MeasuredCost, rows: list[RequestState]
    ) -> StepBudget:
        """What is left for prompts of a step of `limit` seconds (0: any) beside decode `rows`.

        A quarter of the limit at least, so that prompts go on. And as much as a step costs that
        computes nothing, within the limit: steps of one size do not tell the two apart.
        """
        if not limit:
            return cls(tokens)
        limit *= _AIMED / measured.levels[True]
        tokens = min(tokens, max(_FIRST_CHUNK, int(2 * measured.largest)))
        cost = measured.cost
        if not measured.steps:
            return cls(tokens, cost=cost)
        lengths = sum(map(_LENGTH, rows))
        decoding = cost.step + cost.decode * len(rows) + cost.context * lengths
        seconds = max(limit - decoding, min(cost.step, limit), limit * LEAST)
        return cls(tokens, seconds, cost)

    def split(self, parts: int) -> StepBudget:
        """Take one of `parts` equal parts out, of at least one token."""
        part = replace(self, tokens=-(-self.tokens // parts), seconds=self.seconds / parts)
        self.tokens -= part.tokens
        self.seconds -= part.seconds if math.isfinite(part.seconds) else 0.0
        return part

    def give_back(self, part: StepBudget) -> None:
        """Add what is left of a part."""
        self.tokens += part.tokens
        if math.isfinite(part.seconds):
            self.seconds += part.seconds

    def room(self, sequence: RequestState, start: int) -> int:
        """Tokens of `sequence` from `start` on that fit."""
        cost = self.cost
        if cost is None or math.isinf(self.seconds):
            return self.tokens
        least = min(_LEAST_CHUNK, self.tokens)
        count = _within(self.seconds, cost.prefill + cost.pair * start, cost.pair)
        # Tokens before the first scored one cost less.
        plain = max(sequence.score_next - 1 - start, 0)
        if count > plain and sequence.score_next < sequence.score_stop:
            left = self.seconds - self._price(start, plain, 0)
            each = cost.prefill + cost.score + cost.pair * (start + plain)
            count = plain + _within(left, each, cost.pair)
        return int(max(min(count, self.tokens), least))

    def spend(self, start: int, count: int, scored: int) -> None:
        """Note a chunk of `count` tokens from `start` on, `scored` of which get scores."""
        self.tokens -= count
        if self.cost is not None:
            self.seconds = max(self.seconds - self._price(start, count, scored), 0.0)

    def _price(self, start: int, count: int, scored: int) -> float:
        cost = self.cost
        assert cost is not None
        pairs = count * (start + count / 2)
        return cost.prefill * count + cost.pair * pairs + cost.score * scored


def _within(seconds: float, each: float, pair: float) -> float:
    """Tokens that fit into `seconds`: the first costs `each`, and every one `pair` more."""
    if pair > 0:
        return (math.sqrt(each * each + 2 * pair * max(seconds, 0.0)) - each) / pair
    return seconds / each if each > 0 else math.inf


# Pace ---------------------------------------------------------------------------------------------


_LARGE_STEP = 64
"""Minimum prefill tokens of a step that measures the prefill pace."""
_KEPT = 0.9
"""Weight of the older steps beside the next one."""
_ENDED = 0.95
"""Weight of requests that ended before beside the next one."""
_DEVIATIONS = 2.0
"""Standard deviations above the mean at which a request's duration is expected."""


class PromptPace:
    """Seconds per prompt token, measured on recent large steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def begin(self, tokens: int, seconds: float) -> None:
        """Set the pace measured before the first step."""
        self._tokens, self._seconds = float(tokens), seconds

    def note(self, tokens: int, samples: int, seconds: float) -> None:
        """Record a step of `tokens` tokens with `samples` samples."""
        if tokens - samples >= _LARGE_STEP:
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Expected seconds to prefill `tokens` tokens; 0 while nothing was measured."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class ServicePace:
    """Durations of requests from admission to the end, from requests that ended lately."""

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0
        self._rows = 0.0
        self._outputs = 0.0
        self._squares = 0.0

    def note(self, seconds: float, rows: int, outputs: int, *, whole: bool) -> None:
        """Record an ended request that ran among `rows`.

        A request that was cut off (not `whole`) gives a lower bound.
        """
        if not whole and self._count and seconds * self._count <= self._seconds:
            return
        self._count = _ENDED * self._count + 1
        self._seconds = _ENDED * self._seconds + seconds
        self._squares = _ENDED * self._squares + seconds * seconds
        self._rows = _ENDED * self._rows + rows
        self._outputs = _ENDED * self._outputs + outputs

    def seconds(self, rows: int, max_outputs: int | None = None) -> float:
        """Upper estimate of the duration of a request of `max_outputs` outputs at most among `rows`
        rows.

        0 while nothing was measured. With fewer rows than measured the time shrinks in proportion,
        which is the lower bound of the rows' mutual slowdown.
        """
        if not self._count:
            return 0.0
        mean = self._seconds / self._count
        deviation = math.sqrt(max(self._squares / self._count - mean * mean, 0.0))
        expected = (mean + _DEVIATIONS * deviation) * min(rows * self._count / self._rows, 1.0)
        if max_outputs is not None and max_outputs * self._count < self._outputs:
            expected *= max_outputs * self._count / self._outputs
        return expected
