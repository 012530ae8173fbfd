"""Two runs of one task, row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rootlace.evaluation.results import Results
from rootlace.evaluation.statistics import Estimate, estimate, sign_test
from rootlace.wire.errors import InvalidRequest


@dataclass(frozen=True)
class Difference:
    """A metric of one run less that of another, on the rows that both have. `better` and `worse`
    count the rows that differ, `chance` is how likely such a split is where neither is better."""

    metric: str
    first: float
    second: float
    difference: Estimate
    better: int
    worse: int
    chance: float


def compare(first: Results, second: Results) -> list[Difference]:
    """For each metric that both have. Rows are paired by id and prompt, those that share both in
    their order; raises InvalidRequest where they have none in common."""
    scores, others = _by_row(first), _by_row(second)
    pairs = [(one, others[row]) for row, one in scores.items() if row in others]
    if not pairs:
        raise InvalidRequest(
            f"{first.task} with {first.model} and {second.task} with {second.model} "
            "have no rows in common"
        )
    found = []
    for metric in first.metrics:
        both = [(one[metric], two[metric]) for one, two in pairs if metric in one and metric in two]
        if both:
            found.append(_difference(metric, both))
    return found


def _by_row(run: Results) -> dict[tuple[str, str, int], dict[str, float]]:
    """The scores by id, prompt, and how many rows before had the same of both."""
    before: Counter[tuple[str, str]] = Counter()
    found = {}
    for record in run.records:
        row = record.id, record.prompt
        found[*row, before[row]] = record.scores
        before[row] += 1
    return found


def _difference(metric: str, both: list[tuple[float, float]]) -> Difference:
    better = sum(one > two for one, two in both)
    worse = sum(one < two for one, two in both)
    return Difference(
        metric,
        sum(one for one, _ in both) / len(both),
        sum(two for _, two in both) / len(both),
        estimate([one - two for one, two in both]),
        better,
        worse,
        sign_test(better, worse),
    )
