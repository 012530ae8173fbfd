"""Measured times: cost of steps and what a step may compute, pace of prefill, duration of requests,
cost of drafts, ticks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from rootlace.runtime.contracts.plan import PRIOR, StepCost, StepPlan
from rootlace.runtime.scheduler.request import RequestState, Work

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
_PRIOR_WEIGHT = 1e-3
"""Weight of the prior, scaled to the measured times, beside the steps."""


class MeasuredCost:
    """Least squares over recent steps with nonnegative coefficients.

    Each step is weighed by its forecast, so that a relative error counts the same in short and long
    steps. A step counts as at most `_FARTHEST` times slower or faster than its forecast: one that
    stood still with the machine is no measure. Where the steps do not separate the coefficients,
    `PRIOR` does.
    """

    def __init__(self, max_step_tokens: int) -> None:
        prior = self.cost = replace(PRIOR, max_step_tokens=max_step_tokens)
        """As of the coefficients found last."""
        self._units = np.array([getattr(prior, name) for name in _PARTS])
        self._products = np.zeros((len(_PARTS), len(_PARTS)))
        self._sums = np.zeros(len(_PARTS))
        self._solution = np.ones(len(_PARTS))
        """The coefficients in units of the prior."""
        self.steps = 0
        self.largest = 0.0
        """Prompt tokens of the largest step lately."""
        self._solved = 0
        """Steps of which the coefficients are."""

    def note(self, work: Work, seconds: float) -> None:
        """Record the duration of a step."""
        seconds = max(seconds, 1e-6)
        if work[1]:
            self.largest = max(work[1], _LARGEST_KEPT * self.largest)
        parts = self._units * work
        expected = float(parts @ self._solution) if self.steps else 0.0
        if expected < 1e-3 * seconds:  # no step before had such work
            expected = seconds
        self.steps += 1
        parts /= expected
        kept = _STEPS_KEPT if self.steps > _FIRST_STEPS else _FIRST_KEPT
        self._products = kept * self._products + np.outer(parts, parts)
        ratio = min(max(seconds / expected, 1 / _FARTHEST), _FARTHEST)
        self._sums = kept * self._sums + parts * ratio
        if self.steps >= self._solved + min(self.steps // _SOLVED_AFTER, _SOLVED_AFTER):
            self._solve()

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
        return work, float((self._units * work) @ self._solution) if self.steps else 0.0

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


# Budget of a step ---------------------------------------------------------------------------------


_LEAST_CHUNK = 32
"""Tokens that a step computes of a prompt, whatever they cost. To read the weights once takes as
long as to compute some 5 tokens on a CPU, so a large model spends little of its time on that."""
_FIRST_CHUNK = 64
"""Tokens of the first step, when nothing is measured. Later ones have at most twice as many as the
largest lately, so that no forecast goes far beyond what it follows from."""
_LENGTH = attrgetter("length")
LEAST = 0.25
"""Share of a step's bound that prompts have beside any decode rows."""


@dataclass(slots=True)
class StepBudget:
    """What a step may still compute of prompts: `tokens`, which cost `seconds` by `cost`.

    `cost` None: the tokens alone are bounded.
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
        if sequence.scores_missing and count > plain:
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
_SAMPLES = 3600
_ENDED = 0.95
"""Weight of requests that ended before beside the next one."""
_DRAFTED_PER_STEP = 16
"""Prior: drafted tokens that take as long as a step."""
_MOST_PER_STEP = 64
"""Upper bound of the prior on drafted tokens per step time."""
_BELIEVED = 0.25
"""Weight of the prior, in steps with one drafted token and with many."""
_LEARNT, _LEARNT_LONGER = 0.2, 0.05
"""Weight of a step without drafts beside those before, and of a step that took longer.

Another request's prefill or work before the step may have slowed the longer one.
"""
_DRAFTED_STEPS = 24
"""Steps with drafts before one step without drafts is measured."""
_REMEMBERED = 0.995
"""Share of the drafts' measured cost that remains after a step without drafts."""
_HELD_UP = 3.0
"""Upper bound of a step's duration, as a multiple of the expected one."""
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
        """Upper estimate of the duration of a request with at most `most` outputs among `rows`
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


class DraftPace:
    """Extra time of drafts in a step, lately: a fixed part and a part per drafted token.

    A step much slower than expected was delayed by other work, so its time is bounded. A delayed
    step without drafts makes drafts look free. Drafts that look too expensive are not made, so no
    step would correct the estimate: the estimate therefore decays. Where every step has drafts, one
    step now and then runs without, to measure its time.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        """Row count -> seconds of a step without drafts."""
        self._drafted_steps = 0
        """Steps since the last one without drafts, or since one was requested."""
        self._sums = [0.0] * 5
        """Decaying sums over steps with drafts: 1, drafted tokens, tokens squared, extra seconds,
        product.

        The product is that of extra seconds and drafted tokens.
        """

    def note(self, rows: int, drafted: int, seconds: float) -> float:
        """Record a step of `rows` rows with `drafted` tokens; return actual over expected draft
        cost."""
        if not rows or seconds <= 0:
            return 1.0
        usual = self._steps.get(rows)
        if usual is None:
            usual = seconds * _DRAFTED_PER_STEP / (_DRAFTED_PER_STEP + drafted)
            self._steps[rows] = usual
        if drafted:
            self._drafted_steps += 1
            step, token = self._costs(usual)
            expected = max(step + drafted * token, 1e-9)
            longest = max(expected * _HELD_UP, usual)
            took = min(max(seconds - usual, expected / _HELD_UP), longest)
            seen = (1, drafted, drafted * drafted, took, drafted * took)
            self._sums = [_KEPT * old + new for old, new in zip(self._sums, seen, strict=True)]
            return took / expected
        self._drafted_steps = 0
        learnt = _LEARNT if seconds < usual else _LEARNT_LONGER
        self._steps[rows] += learnt * (min(seconds, _HELD_UP * usual) - usual)
        self._sums = [_REMEMBERED * old for old in self._sums]
        return 1.0

    def wants_none(self) -> bool:
        """Whether the next step should have no drafts, to measure its time.

        True once per request: a step with prefill measures nothing, and drafts must not wait for
        the end of a prefill.
        """
        if self._drafted_steps < _DRAFTED_STEPS:
            return False
        self._drafted_steps = 0
        return True

    def price(self, rows: int) -> tuple[float, float]:
        """Cost of having drafts, and of one drafted token, as parts of a row's share of a step."""
        if not self._steps:
            return 0.0, rows / _DRAFTED_PER_STEP
        usual = self._steps.get(rows)
        if usual is None:
            usual = self._steps[min(self._steps, key=lambda known: abs(known - rows))]
        step, token = self._costs(usual)
        share = max(usual, 1e-9) / rows
        return step / share, token / share

    def _costs(self, usual: float) -> tuple[float, float]:
        """Seconds for having drafts, and per token: a line through measurements and prior."""
        believed = usual / _DRAFTED_PER_STEP
        n, d, dd, y, dy = self._sums
        for drafted in (1, _DRAFTED_PER_STEP):
            took = drafted * believed
            n, d, dd = n + _BELIEVED, d + _BELIEVED * drafted, dd + _BELIEVED * drafted * drafted
            y, dy = y + _BELIEVED * took, dy + _BELIEVED * drafted * took
        least = usual / _MOST_PER_STEP
        token = max((n * dy - d * y) / (n * dd - d * d), least)
        step = (y - token * d) / n
        return (step, token) if step > 0 else (0.0, max(dy / dd, least))


class TickTimes:
    """The time of each tick, to a second, for the last hour of use."""

    def __init__(self) -> None:
        self._ticks: deque[int] = deque(maxlen=_SAMPLES)
        self._times: deque[float] = deque(maxlen=_SAMPLES)
        self.due = 0.0
        """The time before which `note` does nothing."""

    def note(self, tick: int, now: float) -> None:
        if now >= self.due:
            self.due = now + 1.0
            self._ticks.append(tick)
            self._times.append(now)

    def seconds_since(self, tick: int, now: float) -> float:
        """Upper bound on the seconds since `tick`: older ticks count as the first known one."""
        if not self._times:
            return 0.0
        at = bisect_right(self._ticks, tick) - 1
        return max(now - self._times[max(at, 0)], 0.0)
