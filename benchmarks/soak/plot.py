"""The plot of a soak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import figure_of


def plot_soak(minutes: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw memory above, hit rate and queue below, by minutes, with a line at each new engine."""
    at = [row["minute"] for row in minutes]

    def values(name: str) -> list[float]:
        return [float("nan") if row.get(name) is None else row[name] for row in minutes]

    with figure_of(path, 3, 1, figsize=(8, 6), sharex=True) as (_, (memory, hits, queue)):
        for name, label in (
            ("gateway_rss_mib", "gateway, resident"),
            ("engine_rss_mib", "engine, resident"),
            ("gateway_traced_mib", "gateway, Python's objects"),
            ("engine_traced_mib", "engine, Python's objects"),
            ("engine_kept_mib", "engine, kept by malloc"),
        ):
            memory.plot(at, values(name), label=label)
        memory.set_ylabel("MiB")
        memory.set_ylim(bottom=0)
        hits.plot(at, values("hit_rate"), label="hit rate")
        hits.plot(at, values("busy"), label="engine busy")
        hits.set_ylim(0, 1)
        queue.plot(at, values("waiting"), label="waiting")
        queue.plot(at, values("running"), label="running")
        queue.plot(at, values("sessions"), label="sessions")
        queue.set_ylim(bottom=0)
        queue.set_xlabel("minutes")
        for axes in (memory, hits, queue):
            axes.legend(frameon=False, fontsize=8, ncols=4)
            previous = 0
            for row in minutes:
                if row["engine"] and previous and row["engine"] != previous:
                    axes.axvline(row["minute"], color="0.7", linewidth=0.8)
                previous = row["engine"] or previous
