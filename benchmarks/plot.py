"""Pictures of results (needs the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def pyplot_for(path: Path) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'rootlace[bench]'") from error
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    return pyplot


def plot_speed_ups(results: list[dict[str, Any]], path: Path) -> None:
    """A bar per load and model: requests per second with the cache over without."""
    pyplot = pyplot_for(path)
    rates = {(r["size"], r["load"], r["cache"]): r["requests_per_second"] for r in results}
    sizes = sorted({size for size, _, _ in rates})
    loads = list(dict.fromkeys(r["load"] for r in results))
    width = 0.8 / len(sizes)
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for place, size in enumerate(sizes):
        heights = [rates[size, load, True] / rates[size, load, False] for load in loads]
        left = [index + (place - (len(sizes) - 1) / 2) * width for index in range(len(loads))]
        bars = axes.bar(left, heights, width * 0.92, label=f"model {size}")
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(loads)), loads)
    axes.set_ylabel("requests/s, cache on over off")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def plot_constrained(
    engines: dict[str, dict[str, Any]], serving: list[dict[str, Any]], path: Path
) -> None:
    """Left: mask times per engine, all constraints. Right: served requests over unconstrained."""
    pyplot = pyplot_for(path)
    figure, (masks, served) = pyplot.subplots(
        1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(1, 1.2)
    )
    known = {name: found["kinds"] for name, found in engines.items() if "kinds" in found}
    columns = {"p50": "mask_p50_us", "p99": "mask_p99_us", "first visit, p99": "mask_first_p99_us"}
    _bars(
        masks,
        {label: [k["regex"][column] for k in known.values()] for label, column in columns.items()},
        [name.replace(" (", "\n(") for name in known],
        lambda value: f"{value:.1f}" if value < 1000 else f"{value / 1000:.0f}k",
    )
    masks.set_yscale("log")
    masks.set_ylabel("mask of a state, microseconds")
    masks.set_title("20 regular expressions", fontsize=10)
    masks.tick_params(axis="x", labelsize=7)
    labels = {"constrained / unconstrained": "no jump", "jump / unconstrained": "jump"}
    _bars(
        served,
        {label: [found["ratios"][key] for found in serving] for key, label in labels.items()},
        [f"{found['load']}\n{found['concurrency']} at a time" for found in serving],
        "%.2f",
    )
    served.axhline(1.0, color="0.4", linewidth=0.8)
    served.set_ylabel("requests/s over unconstrained")
    served.set_title("JSON extraction, served", fontsize=10)
    served.tick_params(axis="x", labelsize=7)
    figure.savefig(path)
    pyplot.close(figure)


def _bars(
    axes: Any,
    series: dict[str, list[float]],
    groups: list[str],
    form: str | Callable[[float], str],
) -> None:
    """Bars of each series beside each other in each group, with their values."""
    width = 0.84 / len(series)
    for place, (label, heights) in enumerate(series.items()):
        left = [index + (place - (len(series) - 1) / 2) * width for index in range(len(groups))]
        bars = axes.bar(left, heights, width * 0.92, label=label)
        axes.bar_label(bars, fmt=form, fontsize=6)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
