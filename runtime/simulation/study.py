"""Every policy on every cache size, and the bounds beside them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.bounds import clairvoyant_bound, infinite_bound
from rootlace.runtime.simulation.engine import Below, Machine
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.replay import Replay, Report, report_on
from rootlace.runtime.simulation.trace import Workload

Progress = Callable[[str, int, int], None]
"""Called with what runs now, and how many of all runs' requests have ended, of how many."""


@dataclass(frozen=True)
class Study:
    """`clairvoyant` has the bound in order of arrival for each of `sizes` (tokens)."""

    workload: Workload
    cost: StepCost
    max_running: int
    sizes: tuple[int, ...]
    reports: list[Report]
    infinite: float
    clairvoyant: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        workload = self.workload
        trace, load = workload.trace, workload.load
        return {
            "trace": {
                "name": trace.name,
                "format": trace.format,
                "requests": len(trace),
                "prompt_tokens": int(trace.prompt_tokens.sum()),
                "output_tokens": int(trace.output_tokens.sum()),
            },
            "load": {
                "requests": len(workload),
                "rate": load.rate,
                "granularity": load.granularity,
                "arrivals_per_second": arrivals_per_second(workload),
            },
            "cost": self.cost.to_json(),
            "max_running": self.max_running,
            "bounds": {
                "infinite": self.infinite,
                "clairvoyant": {str(size): rate for size, rate in self.clairvoyant.items()},
            },
            "runs": [report.to_json() for report in self.reports],
        }


def arrivals_per_second(workload: Workload) -> float:
    """On average; 0 where all come at once."""
    span = float(workload.arrivals[-1])
    return (len(workload) - 1) / span if span else 0.0


def run_study(
    workload: Workload,
    policies: Sequence[NamedPolicy],
    sizes: Sequence[int],
    cost: StepCost,
    max_running: int = 256,
    progress: Progress = lambda what, done, total: None,
    below: tuple[Below, ...] = (),
) -> Study:
    """Replay `workload` under each of `policies` with each of `sizes` tokens of cache, and `below`
    it."""
    total, done = len(workload) * len(sizes) * len(policies), 0
    reports = []
    for size in sizes:
        for policy in policies:
            name = f"{policy.name}, {short(size)} tokens"
            progress(name, done, total)
            began = time.perf_counter()
            replay = Replay(workload, policy, Machine(size, cost, max_running, below))
            outcome = replay.run(partial(_tell, progress, name, done, total))
            reports.append(report_on(workload, outcome, time.perf_counter() - began))
            done += len(workload)
    progress("bounds", done, total)
    return Study(
        workload=workload,
        cost=cost,
        max_running=max_running,
        sizes=tuple(sizes),
        reports=reports,
        infinite=infinite_bound(workload),
        clairvoyant={
            size: clairvoyant_bound(workload, size // workload.granularity) for size in sizes
        },
    )


def _tell(progress: Progress, what: str, before: int, total: int, ended: int) -> None:
    progress(what, before + ended, total)


def default_sizes(workload: Workload) -> list[int]:
    """Six, each twice the one before; the first holds the longest request twice."""
    trace = workload.trace
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    size = 1 << 16
    while size < 2 * longest:
        size *= 2
    return [size << step for step in range(6)]


def short(tokens: int) -> str:
    """1500000 -> 1.5M"""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{letter}"
    return str(tokens)


# Plot ---------------------------------------------------------------------------------------------
#
# A picture of a study: hit rate against cache size (needs matplotlib).


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
