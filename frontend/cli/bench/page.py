"""Figures as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rootlace.cli.bench.load import Figures, Timed

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --main: #3a7d44; --first: #b36b00; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child { text-align: left; } tr { border-top: 1px solid var(--line); }
svg { width: 100%; border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0 1.2rem; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.bar { stroke: var(--main); } .wait { stroke: var(--first); }
.curve { fill: none; stroke: var(--main); }
.grid { stroke: var(--line); } .bad { color: #c33; }
"""
_WIDTH, _HEIGHT, _LEFT, _BELOW = 900, 260, 50, 24
_SHOWN = 400


def page(found: Figures) -> str:
    """The page; times on it are in milliseconds or seconds, as it says."""
    model, url = found.asked["model"], found.asked["url"]
    good = [one for one in found.timed if not one.error]
    names = ("mean", "p50", "p90", "p99", "most")
    head = "".join(f"<th>{name}</th>" for name in ("", *names))
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{1000 * v:,.1f}</td>' for v in spread)}</tr>"
        for name, spread in found.spreads.items()
    )
    rates = "".join(
        f"<tr><td>{escape(name)}</td><td>{value:,.2f}</td></tr>"
        for name, value in found.rates.items()
    )
    errors = "".join(
        f'<p class="bad">{count} times {escape(error)}</p>' for error, count in found.errors.items()
    )
    plots = ""
    if good:
        plots = (
            f"<h2>First token: share of requests by seconds</h2>{_curve([o.first for o in good])}"
            f"<h2>Requests over time (until the first token, then the answer)</h2>{_bars(good)}"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(model)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(model)} at {escape(url)}</h1><p>{escape(found.terms())}</p>{errors}"
        f"<table><tr>{head}</tr>{rows}</table><h2>Rates</h2><table>{rates}</table>{plots}"
        "</body></html>\n"
    )


def _frame(inside: str, longest: float) -> str:
    marks = []
    for part in range(6):
        x = _LEFT + (_WIDTH - _LEFT - 10) * part / 5
        marks.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{_HEIGHT - _BELOW}"/>'
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
            f"{longest * part / 5:.3g} s</text>"
        )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(marks)}{inside}</svg>'


def _curve(values: Sequence[float]) -> str:
    """The cumulative distribution."""
    ranked = sorted(values)
    longest = ranked[-1] or 1e-9
    points = [
        (_x(value, longest), 6 + (_HEIGHT - _BELOW - 6) * (1 - (at + 1) / len(ranked)))
        for at, value in enumerate(ranked)
    ]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    labels = "".join(
        f'<text x="4" y="{10 + (_HEIGHT - _BELOW - 6) * (1 - share):.0f}">{share:.0%}</text>'
        for share in (0.0, 0.5, 1.0)
    )
    return _frame(f'<path class="curve" d="{path}"/>{labels}', longest)


def _bars(timed: Sequence[Timed]) -> str:
    shown = timed[:: max(len(timed) // _SHOWN, 1)]
    longest = max(one.ended for one in timed) or 1e-9
    step = (_HEIGHT - _BELOW - 8) / len(shown)
    lines = []
    for at, one in enumerate(shown):
        y = round(8 + step * (at + 0.5), 1)
        sent, first, ended = (_x(t, longest) for t in (one.sent, one.pieces[0], one.ended))
        height = f'stroke-width="{max(step * 0.8, 0.5):.2f}"'
        lines.append(
            f'<line class="wait" {height} x1="{sent:.1f}" x2="{first:.1f}" y1="{y}" y2="{y}"/>'
            f'<line class="bar" {height} x1="{first:.1f}" x2="{ended:.1f}" y1="{y}" y2="{y}"/>'
        )
    return _frame("".join(lines), longest)


def _x(seconds: float, longest: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 10) * seconds / longest
