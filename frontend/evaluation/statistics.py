"""How sure a mean is, and a difference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean over `rows`, its standard error, and the interval in which 95 % of the means of
    resampled rows lie (percentile bootstrap; Efron 1979)."""

    mean: float
    error: float
    low: float
    high: float
    rows: int


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Of at least one value; the same each time."""
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(spread / (count - 1) / count) if count > 1 else 0.0
    draw = random.Random(seed).choices
    means = sorted(math.fsum(draw(values, k=count)) / count for _ in range(RESAMPLES))
    return Estimate(mean, error, means[RESAMPLES // 40], means[-(RESAMPLES // 40) - 1], count)


def sign_test(better: int, worse: int) -> float:
    """How likely a split as uneven as this, or more so, is where neither is better (two-sided; for
    rows that are right or wrong this is McNemar's exact test)."""
    count = better + worse
    if not count:
        return 1.0
    ways = sum(math.comb(count, at) for at in range(min(better, worse) + 1))
    return min(1.0, 2 * ways / 2**count)
