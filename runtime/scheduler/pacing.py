"""How fast prompts are computed, how long requests take, and when a tick of the tree was."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import replace

import numpy as np

from rootlace.runtime.contracts.plan import PRIOR, StepCost, StepPlan

# Measured cost ------------------------------------------------------------------------------------
#
# What an engine's steps cost, by those that it ran.


_STEPS_KEPT = 0.99
"""What an older step counts beside the next one."""
_PRIOR_WEIGHT = 1e-3
"""How much the prior, scaled to what steps take, counts beside them."""


class MeasuredCost:
    """Least squares over the steps of late, each weighed by its length (an error of a tenth counts
    the same in a short step as in a long one), with coefficients that are not negative;
    where they do not tell things apart, the `PRIOR` does."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        prior = PRIOR
        self._units = np.array([prior.step, prior.prefill, prior.decode, prior.context, prior.pair])
        self._products = np.zeros((5, 5))
        self._sums = np.zeros(5)
        self.steps = 0

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self.steps += 1
        parts = _work(plan) * self._units / max(seconds, 1e-6)
        self._products = _STEPS_KEPT * self._products + np.outer(parts, parts)
        self._sums = _STEPS_KEPT * self._sums + parts

    def cost(self) -> StepCost:
        if not self.steps:
            return replace(PRIOR, max_step_tokens=self._max_step_tokens)
        # As a whole, the prior is so many times too cheap.
        scale = self._sums.sum() / self._products.sum()
        weights = _PRIOR_WEIGHT * np.maximum(np.diag(self._products), 1e-12)
        products = self._products + np.diag(weights)
        sums = self._sums + weights * scale
        found, known = np.zeros(5), np.ones(5, bool)
        while known.any():
            found[:] = 0.0
            found[known] = np.linalg.solve(products[np.ix_(known, known)], sums[known])
            if (found >= 0).all():
                break
            known &= found > 0
        if not found[:2].any():
            found[0] = 1.0
        step, prefill, decode, context, pair = (found * self._units).tolist()
        return StepCost(
            step, prefill, decode, context, pair, self._max_step_tokens, "measured as it runs"
        )


def _work(plan: StepPlan) -> np.ndarray:
    """What `StepCost` multiplies: float64 [5], one for the step itself."""
    counts = np.diff(plan.row_start)
    prompts = counts > 1
    chunks, ends = counts[prompts].astype(np.float64), plan.context_len[prompts]
    return np.array(
        [
            1.0,
            chunks.sum(),
            len(counts) - len(chunks),
            plan.context_len[~prompts].sum(),
            np.dot(chunks, ends - chunks / 2),
        ]
    )


# Pace ---------------------------------------------------------------------------------------------


_LARGE_STEP = 64
"""Steps with fewer tokens of prompts say little of how long a prompt takes."""
_KEPT = 0.9
"""What an older step counts beside the next one."""
_SAMPLES = 3600
_ENDED = 0.95
"""What requests that ended before count beside the next one."""
_DRAFTED_PER_STEP = 16
"""So many drafted tokens are believed to take as long as a step while nothing is known."""
_MOST_PER_STEP = 64
"""Not more drafted tokens than this are ever believed to take as long as a step."""
_BELIEVED = 0.25
"""What is believed counts as much as so many steps with one drafted token, and with many."""
_LEARNT, _LEARNT_LONGER = 0.2, 0.05
"""What a step without drafts counts beside those before, and one that took longer than these, which
others' work or a prompt before it may have done."""
_DRAFTED_STEPS = 24
"""After so many steps with drafts it is time to see how long one takes without."""
_REMEMBERED = 0.995
"""How much of what drafted tokens take is remembered after a step without any."""
_HELD_UP = 3.0
"""A step counts as so many times as long as expected, at most."""
_DEVIATIONS = 2.0
"""By so many standard deviations a request is taken to be longer than the mean."""


class PromptPace:
    """About how many seconds a token of a prompt takes, by the last large steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def begin(self, tokens: int, seconds: float) -> None:
        """So much was measured before the first step."""
        self._tokens, self._seconds = float(tokens), seconds

    def note(self, tokens: int, samples: int, seconds: float) -> None:
        """A step computed so many tokens, and sampled behind so many of them."""
        if tokens - samples >= _LARGE_STEP:
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """How long so many tokens would take; 0 while nothing is known."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class ServicePace:
    """How long requests take from their admission to their end, by those that ended lately."""

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0
        self._rows = 0.0
        self._outputs = 0.0
        self._squares = 0.0

    def note(self, seconds: float, rows: int, outputs: int, *, whole: bool) -> None:
        """A request ended, one of `rows` that ran; of one that was cut off (not `whole`) it is
        known that it would have taken longer."""
        if not whole and self._count and seconds * self._count <= self._seconds:
            return
        self._count = _ENDED * self._count + 1
        self._seconds = _ENDED * self._seconds + seconds
        self._squares = _ENDED * self._squares + seconds * seconds
        self._rows = _ENDED * self._rows + rows
        self._outputs = _ENDED * self._outputs + outputs

    def seconds(self, rows: int, most: int | None = None) -> float:
        """How long nearly all take that generate `most` tokens at most, where `rows` run; 0 while
        nothing is known. Fewer rows are taken to be faster in proportion, which is the least that
        they can be slowed down by each other."""
        if not self._count:
            return 0.0
        mean = self._seconds / self._count
        deviation = math.sqrt(max(self._squares / self._count - mean * mean, 0.0))
        found = (mean + _DEVIATIONS * deviation) * min(rows * self._count / self._rows, 1.0)
        if most is not None and most * self._count < self._outputs:
            found *= most * self._count / self._outputs
        return found


class DraftPace:
    """What drafts add to a step of so many rows, of late: so much for there being any, and so much
    for each drafted token.

    What took much longer than expected was held up by something else, and counts as a few times as
    long, or as a step without drafts; where a step without drafts was held up, those with drafts
    seem to take no time. Where drafts seem to cost too much, none are made, and it would never be
    seen that they do not: so what is known of them is forgotten step by step. Where all steps have
    drafts it would not be seen how long others take: so one has none now and then.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        """Seconds without drafts, by the number of rows."""
        self._drafted_steps = 0
        """Since the last step without drafts, or since one was wanted."""
        self._sums = [0.0] * 5
        """Over steps with drafts, those of long ago counting less: 1, the drafted tokens, their
        square, the seconds more than without drafts, and these times the tokens."""

    def note(self, rows: int, drafted: int, seconds: float) -> float:
        """A step of so many rows, and so many tokens beside theirs, took so long. Returns how many
        times as much as expected its drafts cost."""
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
            most = max(expected * _HELD_UP, usual)
            took = min(max(seconds - usual, expected / _HELD_UP), most)
            seen = (1, drafted, drafted * drafted, took, drafted * took)
            self._sums = [_KEPT * old + new for old, new in zip(self._sums, seen, strict=True)]
            return took / expected
        self._drafted_steps = 0
        learnt = _LEARNT if seconds < usual else _LEARNT_LONGER
        self._steps[rows] += learnt * (min(seconds, _HELD_UP * usual) - usual)
        self._sums = [_REMEMBERED * old for old in self._sums]
        return 1.0

    def wants_none(self) -> bool:
        """Whether the next step better has no drafts, to see how long it takes. That is said once:
        where prompts are in that step, nothing is seen, and drafts are not to wait for their end.
        """
        if self._drafted_steps < _DRAFTED_STEPS:
            return False
        self._drafted_steps = 0
        return True

    def price(self, rows: int) -> tuple[float, float]:
        """What it costs that there are drafts, and what a drafted token costs, as parts of a row's
        share of a step."""
        if not self._steps:
            return 0.0, rows / _DRAFTED_PER_STEP
        usual = self._steps[min(self._steps, key=lambda known: abs(known - rows))]
        step, token = self._costs(usual)
        share = max(usual, 1e-9) / rows
        return step / share, token / share

    def _costs(self, usual: float) -> tuple[float, float]:
        """Seconds for there being drafts, and for each token: the line through what was seen, and
        through what is believed while nothing is known."""
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

    def note(self, tick: int, now: float) -> None:
        if not self._times or now - self._times[-1] >= 1.0:
            self._ticks.append(tick)
            self._times.append(now)

    def seconds_since(self, tick: int, now: float) -> float:
        """At most so long ago: ticks before the first that is known count as that one."""
        if not self._times:
            return 0.0
        at = bisect_right(self._ticks, tick) - 1
        return max(now - self._times[max(at, 0)], 0.0)
