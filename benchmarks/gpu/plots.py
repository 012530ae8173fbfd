"""Pictures of a run of `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plot import pyplot_for

Cases = list[dict[str, Any]]


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """One SVG per part that has something to show; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[Cases, Path], None]] = {
        "decode_attention": draw_attention,
        "extend_attention": draw_attention,
        "tree_attention": draw_tree,
        "decode_step": draw_steps,
        "serving": draw_serving,
        "pointwise": draw_pointwise,
    }
    written = []
    for name, drawing in drawings.items():
        cases = [c for c in result["parts"].get(name, {}).get("cases", ()) if "error" not in c]
        if cases:
            path = folder / f"gpu_{name}.svg"
            drawing(cases, path)
            written.append(path)
    return written


def draw_attention(cases: Cases, path: Path) -> None:
    """Each kernel's share of the ceiling, a group per case."""
    pyplot = pyplot_for(path)
    names = list(dict.fromkeys(name for case in cases for name in case["kernels"]))
    names = [n for n in names if any("us" in c["kernels"].get(n, {}) for c in cases)]
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.1 * len(cases), 3.4), layout="constrained")
    width = 0.84 / max(len(names), 1)
    for place, name in enumerate(names):
        heights = [case["kernels"].get(name, {}).get("share") or 0.0 for case in cases]
        left = [i + (place - (len(names) - 1) / 2) * width for i in range(len(cases))]
        bars = axes.bar(left, heights, width * 0.92, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=6)
    axes.set_xticks(range(len(cases)), [_attention_label(case) for case in cases], fontsize=7)
    bound = "copy bandwidth" if "cache" in cases[0] else "bf16 matmul rate"
    axes.set_ylabel(f"share of the measured {bound}")
    _finish(figure, axes, path, pyplot)


def _attention_label(case: dict[str, Any]) -> str:
    if "cache" in case:
        kind = "" if case["cache"] == "bfloat16" else "\nfp8"
        return f"{case['shape']}\n{case['rows']} x {case['context']}{kind}"
    return f"{case['shape']}\n{case['new']} of {case['context']}"


def draw_tree(cases: Cases, path: Path) -> None:
    """Heat map: how many times as fast as per-row decode, by prefix and rows."""
    pyplot = pyplot_for(path)
    prefixes = sorted({case["prefix"] for case in cases})
    rows = sorted({case["rows"] for case in cases})
    found = {(case["prefix"], case["rows"]): case["speed_up"] for case in cases}
    grid = [[found.get((p, r), float("nan")) for p in prefixes] for r in rows]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    image = axes.imshow(grid, origin="lower", aspect="auto", norm="log", cmap="viridis")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.1f}", ha="center", va="center", color="white", fontsize=8)
    axes.set_xticks(range(len(prefixes)), [f"{p // 1024}k" for p in prefixes])
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("tokens in common")
    axes.set_ylabel("rows")
    axes.set_title("tree attention, times as fast as per-row decode", fontsize=10)
    figure.colorbar(image, ax=axes)
    figure.savefig(path)
    pyplot.close(figure)


def draw_steps(cases: Cases, path: Path) -> None:
    """Seconds of a step by batch size: graphs on, off, and the floor of its bytes."""
    pyplot = pyplot_for(path)
    shapes = list(dict.fromkeys(case["shape"] for case in cases))
    figure, plots = pyplot.subplots(
        1, len(shapes), figsize=(1 + 4 * len(shapes), 3.4), layout="constrained", squeeze=False
    )
    for axes, shape in zip(plots[0], shapes, strict=True):
        for graphs, label in ((True, "graphs"), (False, "kernel by kernel")):
            mine = [c for c in cases if c["shape"] == shape and c["graphs"] == graphs]
            axes.plot([c["rows"] for c in mine], [c["us"] / 1e3 for c in mine], "o-", label=label)
        floor = {c["rows"]: c["floor_us"] for c in cases if c["shape"] == shape and c["floor_us"]}
        ordered = sorted(floor.items())
        axes.plot(
            [r for r, _ in ordered],
            [value / 1e3 for _, value in ordered],
            "k--",
            label="its bytes at copy speed",
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("rows")
        axes.set_ylabel("ms per decode step")
        axes.set_title(shape, fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def draw_serving(cases: Cases, path: Path) -> None:
    labels = [case["engine"] for case in cases]
    _draw_bars(path, labels, [case["tokens_per_second"] for case in cases], "%.0f", "tokens/s")


def draw_pointwise(cases: Cases, path: Path) -> None:
    labels = [f"{case['kernel']}, {case['size']}" for case in cases]
    shares = [case["kernels"]["rootlace"].get("share") or 0.0 for case in cases]
    _draw_bars(path, labels, shares, "%.2f", "share of the measured copy bandwidth")


def _draw_bars(path: Path, labels: list[str], values: list[float], form: str, what: str) -> None:
    pyplot = pyplot_for(path)
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.28 * len(labels)), layout="constrained")
    bars = axes.barh(range(len(labels)), values)
    axes.bar_label(bars, fmt=form, fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(what)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def _finish(figure: Any, axes: Any, path: Path, pyplot: Any) -> None:
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)
