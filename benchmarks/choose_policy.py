"""Which policy should be the default: all of them on public traces and made-up loads.

For each load, rate and cache size: how much of the best hit rate that any policy reaches does the
default have (at least 96 % is wanted), and how long do requests wait, at the 99th percentile,
beside first come, first served (at most 1.2 times as long is wanted)? The best is taken over all
policies, those that starve requests too. The replays are those of `rootlace simulate`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, write_json
from benchmarks.synthetic_traces import write_trace
from rootlace.runtime.config import SchedulerConfig
from rootlace.runtime.simulation.cost import DEFAULT_COST, read_cost
from rootlace.runtime.simulation.plot import plot_study
from rootlace.runtime.simulation.policies import all_policies
from rootlace.runtime.simulation.study import Study, run_study, short
from rootlace.runtime.simulation.trace import Trace, read_trace
from rootlace.runtime.simulation.workload import Load, Workload

LEAST_HITS, MOST_WAITING = 0.96, 1.2

M = 10**6


@dataclass(frozen=True)
class Case:
    """A load (a public trace by the start of its file's name, or a made-up one), and the rates and
    sizes to replay it with: below what the machine of the cost model can do, about that, and above.
    """

    load: str
    rates: tuple[float, ...]
    sizes: tuple[int, ...]


PUBLIC = (
    Case("mooncake_conversation", (0.3, 0.4, 0.6), (M // 2, M, 2 * M, 4 * M, 8 * M)),
    Case("AzureLLMInferenceTrace_code", (1.0, 4.0), (M // 4, M)),
)
MADE_UP = (
    Case("few-shot", (0.8, 1.2, 1.6), (M // 8, M // 4, M // 2, M)),
    Case("agents", (0.8, 1.2, 1.6), (M // 8, M // 4, M // 2)),
    Case("hot-and-cold", (1.6, 2.0), (M // 8, M // 2)),
)


def judge(study: Study, default: str) -> list[dict[str, Any]]:
    """One row per cache size."""
    rows = []
    for size in study.sizes:
        found = {report.policy: report for report in study.reports if report.cache_tokens == size}
        mine, fcfs = found[default], found["fcfs"]
        best = max(found.values(), key=lambda report: report.hit_rate)
        hits = mine.hit_rate / best.hit_rate if best.hit_rate else 1.0
        waiting = mine.waiting[2] / fcfs.waiting[2] if fcfs.waiting[2] > 0 else 1.0
        starved = found["lpm-no-aging"]
        rows.append(
            {
                "trace": study.workload.trace.name,
                "rate": study.workload.load.rate,
                "cache_tokens": size,
                "hit_rate": mine.hit_rate,
                "best_policy": best.policy,
                "best_hit_rate": best.hit_rate,
                "of_best": hits,
                "clairvoyant_own_order": mine.clairvoyant_own_order,
                "infinite": study.infinite,
                "waiting_p99": mine.waiting[2],
                "waiting_p99_fcfs": fcfs.waiting[2],
                "waiting_ratio": waiting,
                "waiting_ratio_no_aging": starved.waiting[2] / max(fcfs.waiting[2], 1e-9),
                "overtaken": mine.longest_overtaking,
                "overtaken_no_aging": starved.longest_overtaking,
                "meets": hits >= LEAST_HITS and waiting <= MOST_WAITING,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['trace'][:22]:22} x{row['rate']:<4g} {short(row['cache_tokens']):>5}  "
            f"hits {row['hit_rate']:.4f} = {row['of_best']:.3f} of the best "
            f"({row['best_policy']}), {row['clairvoyant_own_order']:.4f} with foresight; "
            f"p99 waiting {row['waiting_p99']:.2f} s = {row['waiting_ratio']:.2f} of fcfs "
            f"(without aging {row['waiting_ratio_no_aging']:.2f}); overtaken {row['overtaken']} "
            f"({row['overtaken_no_aging']}){'' if row['meets'] else '  NOT MET'}",
            flush=True,
        )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = ROOT.parent / "shared" / "data" / "traces"
    parser.add_argument("--traces", type=Path, default=shared, help="folder with public traces")
    parser.add_argument("--requests", type=int, default=8000, help="of each made-up load")
    parser.add_argument("--granularity", type=int, default=32)
    parser.add_argument("--cost", default=DEFAULT_COST)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="one SVG per load and rate")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    studies: list[dict[str, Any]] = []
    for trace, case in _loads(given):
        for rate in case.rates:
            load = Load(rate=rate, granularity=given.granularity)
            study = run_study(
                Workload(trace, load), all_policies(), case.sizes, read_cost(given.cost)
            )
            found = judge(study, SchedulerConfig().policy)
            show(found)
            rows += found
            studies.append(study.to_json())
            if given.plots is not None:
                name = f"simulate_{case.load.split('_')[0].lower()}_{rate:g}.svg"
                plot_study(study, given.plots / name)
    print(
        f"{sum(row['meets'] for row in rows)} of {len(rows)} meet both; least hits "
        f"{min(row['of_best'] for row in rows):.3f} of the best, longest waiting "
        f"{max(row['waiting_ratio'] for row in rows):.2f} times fcfs's"
    )
    if given.json is not None:
        write_json(given.json, {"environment": environment(), "choice": rows, "studies": studies})


def _loads(given: argparse.Namespace) -> list[tuple[Trace, Case]]:
    loads = []
    for case in PUBLIC:
        paths = sorted(given.traces.glob(f"{case.load}*"))
        if not paths:
            print(f"{case.load}: left out, there is no such trace in {given.traces}")
        loads += [(read_trace(path), case) for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        for case in MADE_UP:
            path = Path(folder) / f"{case.load}.jsonl"
            write_trace(case.load, given.requests, 0, path)
            loads.append((read_trace(path), case))
    return loads


if __name__ == "__main__":
    main()
