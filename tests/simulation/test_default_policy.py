"""The default policy's fairness on a load made to starve requests (docs/simulation.md)."""

from pathlib import Path

import pytest

from benchmarks.synthetic_traces import write_trace
from rootlace.runtime.config import SchedulerConfig
from rootlace.runtime.simulation.engine import DEFAULT_COST, parse_policy, read_cost
from rootlace.runtime.simulation.study import run_study
from rootlace.runtime.simulation.trace import Load, Workload, read_trace


@pytest.mark.slow
def test_longest_prefix_first_starves_without_aging_and_not_with_it(tmp_path: Path) -> None:
    path = tmp_path / "hot-and-cold.jsonl"
    write_trace(4000, 0, path)
    workload = Workload(read_trace(path), Load(rate=2.0, granularity=32))
    names = [SchedulerConfig().policy, "lpm-no-aging", "fcfs"]
    policies = [parse_policy(name) for name in names]
    reports = run_study(workload, policies, [125_000], read_cost(DEFAULT_COST)).reports
    default, starves, fcfs = reports
    assert starves.waiting[2] > 2 * fcfs.waiting[2]
    assert starves.longest_overtaking > 5 * default.longest_overtaking
    assert default.waiting[2] <= 1.2 * fcfs.waiting[2]
    assert default.hit_rate >= 0.96 * max(report.hit_rate for report in reports)
