"""The growth of a series, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Slope:
    """`per_hour` in the series' unit, with its standard error; `mean` of the series. `points`:
    number of means."""

    per_hour: float
    error: float
    mean: float
    points: int

    def __str__(self) -> str:
        return f"{self.per_hour:+.3g} ± {self.error:.2g}"


Series = tuple[Sequence[float], ...]
"""Times in seconds, values, and what these may depend on beside time."""


def slope_of(series: Sequence[Series], bin_seconds: float = 60.0) -> Slope | None:
    """Return the common slope of several series, each with its own level, by least squares;
    dependences beside time are fitted with it.

    The fit uses means over `bin_seconds`, because neighbouring samples are dependent, and the error
    would come out too small. None with too few means.
    """
    rows, levels = [], []
    for columns in series:
        means = _means(np.column_stack([np.asarray(each, float) for each in columns]), bin_seconds)
        if len(means):
            levels.append(means[:, 1])
            rows.append(means - means.mean(axis=0))
    if not rows:
        return None
    together = np.concatenate(rows)
    y, x = together[:, 1], np.delete(together, 1, axis=1)
    x = x[:, np.ptp(x, axis=0) > 0]
    left = len(x) - len(rows) - x.shape[1]
    if left < 1 or not np.ptp(together[:, 0]):
        return None
    found, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    if rank < x.shape[1]:
        return None
    rest = y - x @ found
    error = math.sqrt(float(rest @ rest) / left * np.linalg.inv(x.T @ x)[0, 0])
    level = float(np.concatenate(levels).mean())
    return Slope(3600 * float(found[0]), 3600 * error, level, len(x))


def _means(rows: np.ndarray, bin_seconds: float) -> np.ndarray:
    """Return the means of each whole bin of the first column, without rows that are not finite."""
    rows = rows[np.isfinite(rows).all(axis=1)]
    if not len(rows):
        return rows
    bins = ((rows[:, 0] - rows[0, 0]) // bin_seconds).astype(int)
    counts = np.bincount(bins)
    there = counts > 0
    return np.column_stack([np.bincount(bins, one)[there] / counts[there] for one in rows.T])
