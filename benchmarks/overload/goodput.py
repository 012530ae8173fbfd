"""Results of requests that were offered at a rate, each with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common import percentile


@dataclass(frozen=True)
class Fate:
    """Result of a request: `seconds` until it was answered or refused, or the client gave up."""

    kind: str
    """"in time", "late", "refused" (429) or "failed"."""
    seconds: float
    client: str = ""


@dataclass(frozen=True)
class Goodput:
    """`good`: answers in time per second. `late`, `failed` and `refused`: shares of all requests.
    `refused_p99`: seconds until 99 % of the refused requests knew. `answered_p99`: until 99 % of
    the answers in time had come."""

    offered: float
    good: float
    late: float
    refused: float
    failed: float
    answered_p50: float
    answered_p99: float
    refused_p50: float
    refused_p99: float


def goodput_of(fates: Sequence[Fate], seconds: float) -> Goodput:
    """Summarise requests that were offered for so many seconds."""

    def times(kind: str) -> list[float]:
        return [one.seconds for one in fates if one.kind == kind]

    count = max(len(fates), 1)
    return Goodput(
        offered=len(fates) / seconds,
        good=len(times("in time")) / seconds,
        late=len(times("late")) / count,
        refused=len(times("refused")) / count,
        failed=len(times("failed")) / count,
        answered_p50=percentile(times("in time"), 0.5),
        answered_p99=percentile(times("in time"), 0.99),
        refused_p50=percentile(times("refused"), 0.5),
        refused_p99=percentile(times("refused"), 0.99),
    )


def arrivals(rate: float, seconds: float, seed: int) -> np.ndarray:
    """Draw times of a Poisson process of `rate` per second."""
    dice = np.random.default_rng(seed)
    gaps = dice.exponential(1 / rate, int(rate * seconds * 1.5) + 50)
    times = np.cumsum(gaps)
    return times[times < seconds]


def goodput_over_best(sustainable: float, loads: Sequence[Goodput]) -> float | None:
    """Return the goodput of the last of `loads` over the best before. None without earlier loads,
    or if much more than the `sustainable` rate was answered: then that rate was too low, and the
    last load no such overload as intended."""
    *before, last = loads
    best = max((one.good for one in before), default=0.0)
    if not best or last.good > 1.1 * sustainable:
        return None
    return last.good / best
