"""Results in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rootlace.evaluation.comparison import Difference
from rootlace.evaluation.results import Results
from rootlace.evaluation.statistics import Estimate


def table(runs: Sequence[Results]) -> Group:
    """Metrics of all runs, by group where there are groups; what each cost; what failed."""
    shown = _table("task", "model", "metric", "value", "± error", "95 % interval", "rows")
    for run in runs:
        for metric, found in run.estimates().items():
            shown.add_row(Text(run.task), Text(run.model), Text(metric), *_cells(found))
        for group, estimates in run.by_group().items():
            for metric, found in estimates.items():
                shown.add_row(Text(f"  {group}"), "", Text(metric), *_cells(found))
    return Group(shown, *[Text(line) for run in runs for line in costs(run)])


def _table(*columns: str) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(Text(column), justify="left" if place < 3 else "right")
    return made


def _cells(found: Estimate) -> tuple[str, ...]:
    interval = f"{found.low:.3f} to {found.high:.3f}"
    return f"{found.mean:.4f}", f"{found.error:.4f}", interval, f"{found.rows:,}"


def costs(run: Results) -> list[str]:
    """What a run took, and what failed, in words."""
    rate = f" ({run.asked / run.seconds:,.1f} a second)" if run.asked and run.seconds else ""
    lines = [
        f"{run.task}: {run.asked:,} rows asked in {run.seconds:,.1f} s{rate}; of "
        f"{run.prompt_tokens:,} prompt tokens {run.hit_rate:.1%} were cached"
    ]
    lines += [f"{run.task}: row {id} failed: {reason}" for id, reason in run.failures[:5]]
    if len(run.failures) > 5:
        lines.append(f"{run.task}: {len(run.failures)} rows failed in all")
    return lines


def comparison_table(first: str, second: str, found: Sequence[Difference]) -> Table:
    """Two runs, of which it is said what they are: a model that is compared with itself has one
    name, and so have two runs in folders of one name."""
    names = ("difference", "95 % interval", "rows", "better", "worse", "p")
    shown = _table("metric", "this", "the other", *names)
    shown.title = Text(f"this: {first}\nthe other: {second}", style="bold")
    shown.title_justify = "left"
    for one in found:
        interval = f"{one.difference.low:+.3f} to {one.difference.high:+.3f}"
        shown.add_row(
            Text(one.metric),
            *(f"{one.first:.4f}", f"{one.second:.4f}", f"{one.difference.mean:+.4f}"),
            *(interval, f"{one.difference.rows:,}"),
            *(str(one.better), str(one.worse), f"{one.chance:.3g}"),
        )
    return shown
