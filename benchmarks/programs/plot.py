"""The results as a picture, after figures 5 and 6 of the SGLang paper (arXiv:2312.07104)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.plot import figure_of, ratio_bars
from benchmarks.programs.report import CACHE_OFF, PEER, ROOTLACE, Found

ENGINES = {ROOTLACE: "Rootlace", CACHE_OFF: "Rootlace, cache off", PEER: "vLLM"}


def plot_programs(found: Mapping[str, Mapping[str, Found]], path: Path) -> None:
    """Draw programs per second above, seconds of one alone below; both over Rootlace's."""
    groups = [name.replace(" of ", "\nof ").replace(", ", ",\n") for name in found]
    throughput, latency = {}, {}
    for engine, label in ENGINES.items():
        mine = [engines.get(engine) for engines in found.values()]
        if any(mine):
            throughput[label] = [1 / one.throughput_ratio if one else None for one in mine]
            latency[label] = [one.latency_ratio if one else None for one in mine]
    with figure_of(path, 2, 1, figsize=(11, 5.2)) as (_, (above, below)):
        ratio_bars(above, throughput, groups)
        above.set_ylabel("throughput, normalised")
        above.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
        ratio_bars(below, latency, groups)
        below.set_ylabel("latency, normalised")
        below.get_legend().remove()
