"""Results as tables, and as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rootlace.evaluation.questions import Estimate, chosen, estimate, sign_test
from rootlace.evaluation.run import Record, Results
from rootlace.wire.errors import InvalidRequest

# Comparison ---------------------------------------------------------------------------------------
#
# Two runs of one task, row by row.


@dataclass(frozen=True)
class Difference:
    """Difference of a metric between two runs, on their common rows. `better` and `worse` count the
    differing rows; `chance` is the sign test's p-value."""

    metric: str
    first: float
    second: float
    difference: Estimate
    better: int
    worse: int
    chance: float


def compare(first: Results, second: Results) -> list[Difference]:
    """Compare each metric of both runs. Rows are paired by id and prompt, duplicates by their
    order. Raises InvalidRequest if no row is common."""
    scores, others = _by_row(first), _by_row(second)
    pairs = [(one, others[row]) for row, one in scores.items() if row in others]
    if not pairs:
        raise InvalidRequest(
            f"{first.task} with {first.model} and {second.task} with {second.model} "
            "have no rows in common"
        )
    differences = []
    for metric in first.metrics:
        both = [(one[metric], two[metric]) for one, two in pairs if metric in one and metric in two]
        if both:
            differences.append(_difference(metric, both))
    return differences


def _by_row(run: Results) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return the scores by id, prompt, and number of earlier rows with the same id and prompt."""
    before: Counter[tuple[str, str]] = Counter()
    scores = {}
    for record in run.records:
        row = record.id, record.prompt
        scores[*row, before[row]] = record.scores
        before[row] += 1
    return scores


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


# Table --------------------------------------------------------------------------------------------
#
# Results in a terminal.


def table(runs: Sequence[Results]) -> Group:
    """Return tables of all runs' metrics, also by group, with costs and failures."""
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
    """Return the time, tokens and failures of a run, in words."""
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
    """Return a table of two runs with their descriptions, since models or folders may have the same
    name."""
    names = ("difference", "95 % interval", "rows", "better", "worse", "p")
    shown = _table("metric", "this", "the other", *names)
    shown.title = Text(f"this: {first}\nthe other: {second}", style="bold")
    shown.title_justify = "left"
    for one in found:
        shown.add_row(Text(one.metric), *_compared(one))
    return shown


def _compared(one: Difference) -> tuple[str, ...]:
    interval = f"{one.difference.low:+.3f} to {one.difference.high:+.3f}"
    return (
        *(f"{one.first:.4f}", f"{one.second:.4f}", f"{one.difference.mean:+.4f}"),
        *(interval, f"{one.difference.rows:,}"),
        *(str(one.better), str(one.worse), f"{one.chance:.3g}"),
    )


# Page ---------------------------------------------------------------------------------------------


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --right: #3a7d44; --wrong: #c33; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; } tr { border-top: 1px solid var(--line); }
td, th { padding: .2rem .8rem; text-align: right; vertical-align: top; }
td:first-child, th:first-child, .rows td { text-align: left; }
svg { width: 14rem; height: 1em; } svg line { stroke: var(--line); } svg .in { stroke: var(--right);
stroke-width: 4; } svg circle { fill: currentColor; }
pre { white-space: pre-wrap; margin: .3em 0; } .right { color: var(--right); }
.wrong { color: var(--wrong); } #wrong:checked ~ table tr.good { display: none; }
"""
SHOWN = 2000
"""Maximum number of rows on a page; the run's file has all rows."""


def page(run: Results, compared: Results | None, found: Sequence[Difference]) -> str:
    """Return the page of a run. `found` are the differences from the run `compared`, if any."""
    parts = [
        f"<h1>{escape(run.task)}</h1><p>{escape(run.model)}</p>",
        *[f"<p>{escape(line)}</p>" for line in costs(run)],
        _estimates({"": run.estimates(), **run.by_group()}),
    ]
    if compared is not None:
        parts += [f"<h2>Compared with {escape(compared.task)}, {escape(compared.model)}</h2>"]
        parts += [_differences(found)]
    parts += ["<h2>Rows</h2>", _rows(run.records)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(run.task)}, {escape(run.model)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of HTML cells."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _estimates(groups: dict[str, dict[str, Estimate]]) -> str:
    rows = []
    for group, estimates in groups.items():
        for metric, one in estimates.items():
            mean, error, interval, count = _cells(one)
            picture = f"{interval} {_interval(one)}"
            rows.append((escape(group), escape(metric), mean, error, picture, count))
    return _html_table(("", "metric", "value", "± error", "95 % interval", "rows"), rows)


def _interval(one: Estimate) -> str:
    """Draw the interval on a scale from 0 to 1, as SVG."""
    low, mean, high = (f"{2 + 196 * value:.1f}" for value in (one.low, one.mean, one.high))
    return (
        '<svg viewBox="0 0 200 12" role="img"><line x1="2" x2="198" y1="6" y2="6"/>'
        f'<line class="in" x1="{low}" x2="{high}" y1="6" y2="6"/><circle cx="{mean}" cy="6" r="4"/>'
        "</svg>"
    )


def _differences(found: Sequence[Difference]) -> str:
    rows = [(escape(one.metric), *_compared(one)) for one in found]
    head = ("", "this", "the other", "difference", "95 % interval")
    return _html_table((*head, "rows", "better", "worse", "p"), rows)


def _rows(records: Sequence[Record]) -> str:
    more = f"<p>The first {SHOWN:,} of {len(records):,}.</p>" if len(records) > SHOWN else ""
    lines = "".join(map(_row, records[:SHOWN]))
    return (
        f'{more}<input type="checkbox" id="wrong"><label for="wrong"> only what is wrong</label>'
        f'<table class="rows">{lines}</table>'
    )


def _row(record: Record) -> str:
    good = all(score == 1 for score in record.scores.values())
    scores = "<br>".join(
        f'<span class="{"right" if score == 1 else "wrong"}">{escape(metric)} {score:g}</span>'
        for metric, score in record.scores.items()
    )
    answer = _choices(record) if record.choices else _response(record)
    return (
        f'<tr class="{"good" if good else "bad"}"><td>{escape(record.id)}</td><td>{scores}</td>'
        f"<td><details><summary>{answer}</summary><pre>{escape(record.prompt)}</pre></details></td></tr>"
    )


def _choices(record: Record) -> str:
    best = chosen("acc", record.scored())
    lines = []
    for number, one in enumerate(record.scored()):
        text = f"{escape(one.text)} ({one.log_likelihood:.2f})"
        kind = "right" if number == record.answer else "wrong" if number == best else ""
        lines.append(f'<span class="{kind}">{"&rarr; " if number == best else ""}{text}</span>')
    return "<br>".join(lines)


def _response(record: Record) -> str:
    taken = ", ".join(f"{name}: {text}" for name, text in record.extracted.items())
    verdict = f" &middot; judged {escape(record.verdict)}" if record.verdict else ""
    expected = f"<br>expected: {escape(record.expected)}" if record.expected else ""
    return f"{escape(record.response)}<br><i>{escape(taken)}</i>{verdict}{expected}"
