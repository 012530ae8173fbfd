"""Pictures of results (needs the extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_speed_ups(results: list[dict[str, Any]], path: Path) -> None:
    """A bar per load and model: requests per second with the cache over without."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'rootlace[bench]'") from error
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

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
