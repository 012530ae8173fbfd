"""Measured times: cost of steps, pace of prefill, duration of requests."""

from __future__ import annotations

import math
from collections import deque
from operator import mul
from statistics import median

import numpy as np
from msgspec.structs import replace

from rootlace.runtime.contracts.plan import PRIOR, StepPlan
from rootlace.runtime.scheduler.request import Work

# Measured cost of steps ---------------------------------------------------------------------------


_PARTS = ("step", "prefill", "decode", "context", "pair", "score")
"""Names of the coefficients of `StepCost`."""
_STEPS_KEPT = 0.99
"""Weight of the older steps beside the next one."""
_FIRST_STEPS, _FIRST_KEPT = 4, 0.5
"""Number and weight of the first steps. First steps load code and data, so their weight is low."""
_FIRST_WEIGHT = 0.5
"""Weight of the prior beside few steps, divided by their number, since few steps say little."""
_LARGEST_KEPT = 0.9
_FARTHEST = 2.0
_SOLVED_AFTER, _SOLVED_PART = 32, 8
"""Most steps until coefficients are solved again, and the share of all steps that suffices before.
Solving takes 0.1 ms."""
_SURPRISE, _LONG = 1.25, 0.02
"""Factor over earlier steps' prompt tokens, and seconds, of a step that causes a new solution: the
next steps are as large."""
_PRIOR_WEIGHT = 1e-3
"""Weight of the prior, scaled to the measured times, beside the steps."""
_NONE = np.empty(0)
_LEVEL_OF, _LEVEL_MOST = 3, 8.0
"""Number of steps whose median is a level, and the largest factor of a level above or below 1."""


class MeasuredCost:
    """Cost of steps: least squares over recent steps with nonnegative coefficients.

    Each step is weighted by its forecast, so that a relative error counts the same in short and
    long steps. A step counts as at most `_FARTHEST` times slower or faster than its forecast: a
    step that stood still with the machine is no measure. If the steps do not separate the
    coefficients, `PRIOR` does.

    The coefficients learn slowly, for example at the first prompt after hours of decoding. So there
    are two *levels*, for steps with prompts and for other steps. A level is the median ratio of
    actual to computed seconds over the last three steps.
    """

    def __init__(self, max_step_tokens: int) -> None:
        prior = self.cost = replace(PRIOR, max_step_tokens=max_step_tokens)
        """Coefficients of the last solution."""
        self._units = np.array([getattr(prior, name) for name in _PARTS])
        self._products = np.zeros((len(_PARTS), len(_PARTS)))
        self._sums = np.zeros(len(_PARTS))
        self._rates: list[float] = self._units.tolist()
        """Coefficients in the order of `_PARTS`."""
        self._fresh: list[tuple[Work, float, float]] = []
        """Steps since the last solution: work, expected seconds, and ratio of actual to expected
        seconds."""
        self._recent: list[deque[tuple[Work, float]]] = [deque(maxlen=_LEVEL_OF) for _ in range(2)]
        """Work and seconds of the last steps without prompts, and with prompts."""
        self.levels = [1.0, 1.0]
        """Levels of the steps without prompts, and with prompts."""
        self.steps = 0
        self.largest = 0.0
        """Prompt tokens of the largest recent step."""
        self._solved = 0
        """Number of steps in the last solution."""

    def note(self, work: Work, seconds: float) -> None:
        """Record the duration of a step."""
        seconds = max(seconds, 1e-6)
        unlike = work[1] > _SURPRISE * self.largest and seconds > _LONG
        if work[1]:
            self.largest = max(work[1], _LARGEST_KEPT * self.largest)
        kind = int(work[1] > 0)
        self._recent[kind].append((work, seconds))
        expected = sum(map(mul, self._rates, work)) if self.steps else 0.0
        if expected < 1e-3 * seconds:  # no earlier step had such work
            expected = seconds
        self.steps += 1
        ratio = min(max(seconds / expected, 1 / _FARTHEST), _FARTHEST)
        self._fresh.append((work, expected, ratio))
        due = self._solved + min(self.steps // _SOLVED_PART, _SOLVED_AFTER)
        solves = unlike or self.steps >= due
        if solves:
            self._solve()
        for each in (0, 1) if solves else (kind,):
            if len(recent := self._recent[each]) == _LEVEL_OF:
                slower = []
                for of, took in recent:
                    slower.append(took / max(sum(map(mul, self._rates, of)), 1e-9))
                self.levels[each] = min(max(median(slower), 1 / _LEVEL_MOST), _LEVEL_MOST)

    def forecast(self, plan: StepPlan) -> tuple[Work, float]:
        """Return the work of a step, and its expected seconds; 0 before the first measured step."""
        rows, context = len(plan.context_len), plan.context_len
        chunks, pairs = _NONE, 0.0
        if plan.row_start[-1] > rows:
            counts = np.diff(plan.row_start)
            prompts = counts > 1
            chunks, ends = counts[prompts].astype(np.float64), context[prompts]
            context, pairs = context[~prompts], float(np.dot(chunks, ends - chunks / 2))
        work = (
            1.0,
            float(chunks.sum()),
            rows - len(chunks),
            float(context.sum()),
            pairs,
            sum(len(row.targets) for row in plan.prompt_scores) if plan.prompt_scores else 0,
        )
        if not self.steps:
            return work, 0.0
        return work, sum(map(mul, self._rates, work)) * self.levels[work[1] > 0]

    def _solve(self) -> None:
        # All steps since the last solution at once; each of the first steps is solved alone.
        works, expected, ratios = map(np.array, zip(*self._fresh, strict=True))
        self._fresh = []
        decay = _STEPS_KEPT if self.steps > _FIRST_STEPS else _FIRST_KEPT
        weights = decay ** np.arange(len(works))[::-1]
        parts = self._units * works / expected[:, None]
        weighted = (parts * weights[:, None]).T
        self._products = decay ** len(works) * self._products + weighted @ parts
        self._sums = decay ** len(works) * self._sums + weighted @ ratios
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
        self._rates, self._solved = (solution * self._units).tolist(), self.steps
        rates = dict(zip(_PARTS, self._rates, strict=True))
        self.cost = replace(self.cost, **rates, source="measured as it runs")


# Pace ---------------------------------------------------------------------------------------------


_LARGE_STEP = 64
"""Minimum prefill tokens of a step that measures the prefill pace."""
_KEPT = 0.9
"""Weight of the older steps beside the next one."""
_ENDED = 0.95
"""Weight of requests that ended earlier beside the next one."""
_DEVIATIONS = 2.0
"""Standard deviations above the mean at which a request's duration is expected."""


class PromptPace:
    """Seconds per prompt token, measured on recent large steps. A step counts as at most
    `_FARTHEST` times slower or faster than earlier steps: see `MeasuredCost`."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def begin(self, tokens: int, seconds: float) -> None:
        """Set the pace measured before the first step."""
        self._tokens, self._seconds = float(tokens), seconds

    def note(self, tokens: int, samples: int, seconds: float) -> None:
        """Record a step of `tokens` tokens with `samples` samples."""
        if tokens - samples >= _LARGE_STEP:
            seconds = min(seconds, _FARTHEST * self.seconds(tokens) or seconds)
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds to prefill `tokens` tokens; 0 before any measurement."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class ServicePace:
    """Durations of requests from admission to the end, from requests that ended lately.

    A request counts as at most `_FARTHEST` times as long as its rows and outputs predict: a request
    that stood still with the machine is no measure. Requests without outputs predict nothing.
    """

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
        if self._count and (self._outputs or not outputs):
            more = max(rows * self._count / self._rows, 1.0)
            more *= max(outputs * self._count / self._outputs, 1.0) if outputs else 1.0
            seconds = min(seconds, _FARTHEST * more * self.seconds(rows) or seconds)
        self._count = _ENDED * self._count + 1
        self._seconds = _ENDED * self._seconds + seconds
        self._squares = _ENDED * self._squares + seconds * seconds
        self._rows = _ENDED * self._rows + rows
        self._outputs = _ENDED * self._outputs + outputs

    def seconds(self, rows: int, max_outputs: int | None = None) -> float:
        """Return an upper estimate of a request's duration, with `max_outputs` outputs at most,
        among `rows` rows; 0 before the first measurement.

        With fewer rows than measured, the time shrinks in proportion: the least possible effect of
        fewer rows.
        """
        if not self._count:
            return 0.0
        mean = self._seconds / self._count
        deviation = math.sqrt(max(self._squares / self._count - mean * mean, 0.0))
        expected = (mean + _DEVIATIONS * deviation) * min(rows * self._count / self._rows, 1.0)
        if max_outputs is not None and max_outputs * self._count < self._outputs:
            expected *= max_outputs * self._count / self._outputs
        return expected
