"""What became of requests that were offered at a rate, each with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common import percentile


@dataclass(frozen=True)
class Fate:
    """Of one request: `seconds` until it was answered, refused, or its client gave up."""

    kind: str
    """"in time", "late", "refused" (429) or "failed"."""
    seconds: float
    client: str = ""


@dataclass(frozen=True)
class Goodput:
    """`good`: answers in time per second. `late` and `failed` of all requests, `refused` likewise;
    `refused_p99`: seconds until so many of those that were refused knew. `answered_p99`: until so
    many of the answers in time were there."""

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
    """Of requests that were offered for so many seconds."""

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
    """Times of a Poisson process of `rate` per second."""
    dice = np.random.default_rng(seed)
    gaps = dice.exponential(1 / rate, int(rate * seconds * 1.5) + 50)
    times = np.cumsum(gaps)
    return times[times < seconds]


def goodput_over_best(sustainable: float, loads: Sequence[Goodput]) -> float | None:
    """What was answered in time at the last of `loads` over the best of those before. None where
    nothing can be said: there is none before, or so much more than the `sustainable` rate was
    answered that this was too low, and the last load no such overload as it was to be."""
    *before, last = loads
    best = max((one.good for one in before), default=0.0)
    if not best or last.good > 1.1 * sustainable:
        return None
    return last.good / best
