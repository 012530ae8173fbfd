"""A picture of a study: hit rate against cache size (needs matplotlib)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rootlace.runtime.simulation.study import Study, short

_SHADES = {"fcfs": "0.45", "lpm": "C0", "dfs": "C2"}


def plot_study(study: Study, path: Path) -> None:
    """Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    # Text as text, and the same bytes for the same figures.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rootlace"}):
        figure = _draw(study, pyplot)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw(study: Study, pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    sizes = list(study.sizes)
    axes.axhline(100 * study.infinite, color="0.2", linewidth=1, linestyle=":")
    axes.annotate(
        "infinite cache",
        (sizes[0], 100 * study.infinite),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
    axes.plot(
        sizes,
        [100 * study.clairvoyant[size] for size in sizes],
        color="0.2",
        linewidth=1,
        linestyle="--",
        label="clairvoyant, in order of arrival",
    )
    for name in dict.fromkeys(report.policy for report in study.reports):
        found = {r.cache_tokens: 100 * r.hit_rate for r in study.reports if r.policy == name}
        base = re.split(r"[-:+]", name)[0]
        axes.plot(
            sizes,
            [found[size] for size in sizes],
            marker="o" if name == base else "x",
            markersize=4,
            linestyle="-" if name == base else "-.",
            linewidth=1.4 if name == base else 1,
            color=_SHADES.get(base),
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [short(size) for size in sizes])
    axes.minorticks_off()
    # The infinite cache is above all others, and its name is above its line.
    axes.set_ylim(0, 108 * study.infinite or 1)
    axes.set_xlabel("cache, tokens")
    axes.set_ylabel("prompt tokens found in the cache, %")
    workload = study.workload
    axes.set_title(
        f"{workload.trace.name}: {len(workload):,} requests at rate {workload.load.rate:g}",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
