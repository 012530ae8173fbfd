"""How fast a series grows, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Slope:
    """`per_hour` in the series' unit, with its standard error; `mean` of the series. `points`: how
    many means it is of."""

    per_hour: float
    error: float
    mean: float
    points: int

    def __str__(self) -> str:
        return f"{self.per_hour:+.3g} ± {self.error:.2g}"


def slope_of(
    series: Sequence[tuple[Sequence[float], Sequence[float]]], bin_seconds: float = 60.0
) -> Slope | None:
    """The common slope of several series of (times in seconds, values), each with a level of its
    own, by least squares.

    Of means over `bin_seconds`, because neighbouring samples are not independent of each other: the
    error would come out too small. None where there are too few.
    """
    times, values, mean = [], [], []
    for at, what in series:
        when, found = _means(np.asarray(at, float), np.asarray(what, float), bin_seconds)
        mean.append(found)
        times.append(when - when.mean() if len(when) else when)
        values.append(found - found.mean() if len(found) else found)
    x, y = np.concatenate(times or [np.empty(0)]), np.concatenate(values or [np.empty(0)])
    left = len(x) - sum(len(one) > 0 for one in times) - 1
    spread = float(x @ x)
    if left < 1 or not spread:
        return None
    slope = float(x @ y) / spread
    rest = y - slope * x
    error = math.sqrt(float(rest @ rest) / left / spread)
    level = float(np.concatenate(mean).mean())
    return Slope(3600 * slope, 3600 * error, level, len(x))


def _means(
    times: np.ndarray, values: np.ndarray, bin_seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of each whole bin; what is not a number is left out."""
    known = np.isfinite(values)
    times, values = times[known], values[known]
    if not len(times):
        return times, values
    bins = ((times - times[0]) // bin_seconds).astype(int)
    counts = np.bincount(bins)
    there = counts > 0
    return tuple(np.bincount(bins, one)[there] / counts[there] for one in (times, values))  # type: ignore[return-value]
