"""Pictures of a run of `benchmarks.gpu`: one per part that has something to show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plot import figure_of, grouped_bars

Case = dict[str, Any]


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """The files written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[Any, list[Case]], None]] = {
        "decode_attention": draw_shares,
        "extend_attention": draw_shares,
        "tree_attention": draw_tree,
        "decode_step": draw_steps,
        "pointwise": draw_shares,
    }
    written = []
    for name, drawing in drawings.items():
        cases = [c for c in result["parts"].get(name, {}).get("cases", ()) if "error" not in c]
        if cases:
            path = folder / f"gpu_{name}.svg"
            with figure_of(path, figsize=(1.5 + 0.8 * max(len(cases), 5), 3.4)) as (_, axes):
                drawing(axes, cases)
            written.append(path)
    return written


def draw_shares(axes: Any, cases: list[Case]) -> None:
    """Each kernel's share of the ceiling, a group per case."""
    names = list(dict.fromkeys(name for case in cases for name in case["kernels"]))
    series = {
        name: [case["kernels"].get(name, {}).get("share") or 0.0 for case in cases]
        for name in names
    }
    grouped_bars(axes, series, [_label(case) for case in cases], "%.2f")
    axes.tick_params(axis="x", labelsize=6)
    axes.set_ylabel("share of the measured ceiling")


def _label(case: Case) -> str:
    keys = ("kernel", "size", "shape", "rows", "new", "context", "cache")
    return "\n".join(f"{case[key]}" for key in keys if key in case)


def draw_tree(axes: Any, cases: list[Case]) -> None:
    """How many times as fast as per-row decode, by rows; a line per prefix."""
    for prefix in sorted({case["prefix"] for case in cases}):
        mine = [case for case in cases if case["prefix"] == prefix]
        _line(axes, mine, "speed_up", f"{prefix} tokens in common")
    axes.set_ylabel("times as fast as per-row decode")
    _by_rows(axes)


def draw_steps(axes: Any, cases: list[Case]) -> None:
    """Microseconds of a step by rows: graphs on, off, and the floor of its bytes."""
    for shape in dict.fromkeys(case["shape"] for case in cases):
        for graphs, label in ((True, "graphs"), (False, "kernel by kernel")):
            mine = [c for c in cases if (c["shape"], c["graphs"]) == (shape, graphs)]
            _line(axes, mine, "us", f"{shape}, {label}")
            if graphs:
                _line(axes, [c for c in mine if c["floor_us"]], "floor_us", f"{shape}, its bytes")
    axes.set_ylabel("microseconds per decode step")
    _by_rows(axes)


def _line(axes: Any, cases: list[Case], value: str, label: str) -> None:
    axes.plot([case["rows"] for case in cases], [case[value] for case in cases], "o-", label=label)


def _by_rows(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.legend(frameon=False, fontsize=7)
