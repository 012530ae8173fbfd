"""The picture of a run: how many times faster than the best peer, per workload and model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.report import SPEED_TARGETS
from benchmarks.plot import pyplot_for

SIZES = {"a": "15M parameters", "b": "150M parameters"}
TITLES = {
    "W1": "few-shot",
    "W2": "chat",
    "W3": "tree search",
    "W4": "nothing\nshared",
    "W5": "long\ndocuments",
}


def plot_ratios(result: Mapping[str, Any], path: Path) -> None:
    """Left: wall times of the best peer over ours. Right: mean times to the first token.

    A short line on each group of bars of the left marks the target.
    """
    pyplot = pyplot_for(path)
    figure, (speed, first) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    peers = sorted({row["engine"] for row in result["rows"]} - {"rootlace", "rootlace programs"})
    _bars(speed, result["ratios"])
    _bars(first, result["ttft_ratios"])
    for place, workload in enumerate(_workloads(result["ratios"])):
        bound = SPEED_TARGETS[workload]
        speed.plot([place - 0.45, place + 0.45], [bound, bound], color="0.2", linewidth=1.2)
    speed.set_ylabel("wall time, best peer / ours")
    first.set_ylabel("time to first token, best peer / ours")
    speed.set_title(f"peers: {', '.join(peers)}; lines: targets", fontsize=9)
    speed.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def _workloads(ratios: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(workload for found in ratios.values() for workload in found))


def _bars(axes: Any, ratios: Mapping[str, Mapping[str, float]]) -> None:
    workloads = _workloads(ratios)
    width = 0.8 / max(1, len(ratios))
    for place, (model, found) in enumerate(ratios.items()):
        shift = (place - (len(ratios) - 1) / 2) * width
        known = [(i + shift, found[name]) for i, name in enumerate(workloads) if name in found]
        bars = axes.bar(
            [left for left, _ in known],
            [height for _, height in known],
            width * 0.92,
            label=SIZES.get(model, model),
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(workloads)), [TITLES.get(name, name) for name in workloads])
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
