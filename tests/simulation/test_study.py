"""Studies: policies by name, reports, pictures."""

import json
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest

from rootlace.runtime.config import Eviction, SchedulerConfig
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.engine import BadPolicy, Machine, all_policies, parse_policy
from rootlace.runtime.simulation.study import (
    Study,
    default_sizes,
    replay,
    report_on,
    run_study,
    short,
)
from rootlace.runtime.simulation.trace import Load, Workload
from tests.simulation.traces import token_trace

COST = StepCost(step=1.0, prefill=0.01, max_step_tokens=64)


def _workload() -> Workload:
    stems = [[k] * 20 for k in range(5)]
    return Workload(
        token_trace([[*stems[n % 5], 10 + n] for n in range(40)], outputs=4, gap=0.5),
        Load(granularity=1),
    )


@pytest.fixture(scope="module")
def study() -> Study:
    policies = [parse_policy(name) for name in ("fcfs", "lpm", "dfs-no-aging")]
    return run_study(_workload(), policies, [48, 160], COST, max_running=2)


def test_policies_by_name() -> None:
    config = SchedulerConfig()
    lpm = parse_policy("lpm")
    assert (lpm.policy, lpm.max_overtaken) == ("lpm", config.max_overtaken)
    assert lpm.max_delay == config.max_delay
    assert parse_policy("lpm-no-aging").max_overtaken > 10**12
    assert parse_policy("dfs:7").max_overtaken == 7 and parse_policy("dfs:7").max_delay == 0
    assert parse_policy("lpm:7:0.5").max_delay == 0.5
    names = [policy.name for policy in all_policies()]
    assert names == ["lpm", "fcfs", "dfs", "lpm-no-aging", "dfs-no-aging"] + [
        f"lpm+{name}" for name in get_args(Eviction) if name != "lru"
    ]
    assert (lpm.eviction, parse_policy("dfs:7+lfuda").eviction) == ("lru", "lfuda")
    for bad in (
        "",
        "LPM",
        "fcfs-no-aging",
        "lpm:",
        "lpm:-1",
        "lpm:1:",
        "lpm:x",
        "sjf",
        "lpm:1:2:3",
        "lpm+",
        "lpm+mru",
        "+lfuda",
    ):
        with pytest.raises(BadPolicy, match="there are lpm, fcfs, dfs"):
            parse_policy(bad)


def test_rows_of_a_study(study: Study) -> None:
    found = [(report.cache_tokens, report.policy) for report in study.reports]
    assert found == [(size, name) for size in (48, 160) for name in ("fcfs", "lpm", "dfs-no-aging")]
    for report in study.reports:
        assert report.refused == 0 and report.requests == 40
        assert report.clairvoyant_own_order is not None
        assert report.hit_rate <= report.clairvoyant_own_order <= study.infinite
        assert report.ttft == tuple(sorted(report.ttft))
        assert report.waiting[2] <= report.longest_wait
    small = {r.policy: r for r in study.reports if r.cache_tokens == 48}
    assert small["fcfs"].hit_rate < small["lpm"].hit_rate
    assert small["fcfs"].longest_overtaking == 0 < small["lpm"].longest_overtaking
    assert study.clairvoyant[48] < study.clairvoyant[160] <= study.infinite


def test_percentiles_are_those_of_the_requests() -> None:
    workload = _workload()
    outcome = replay(workload, parse_policy("lpm"), Machine(160, COST, 2))
    report = report_on(workload, outcome, 1.0)
    assert report.ttft == pytest.approx(np.percentile(outcome.first, [50, 90, 99]))
    assert report.tpot == pytest.approx(np.percentile(outcome.decoding / 3, [50, 90, 99]))
    assert report.requests_per_second == pytest.approx(40 / outcome.seconds)
    assert report.output_tokens_per_second == pytest.approx(160 / outcome.seconds)


def test_json(study: Study) -> None:
    found = json.loads(json.dumps(study.to_json()))
    assert len(found["runs"]) == 6 and found["cost"]["step"] == 1.0
    assert found["runs"][0]["ttft"].keys() == {"p50", "p90", "p99"}
    assert found["bounds"]["clairvoyant"].keys() == {"48", "160"}
    assert found["load"]["requests"] == 40


def test_a_picture_has_every_line(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from rootlace.runtime.simulation.study import plot_study

    path = tmp_path / "hits.svg"
    plot_study(study, path)
    root = ElementTree.parse(path).getroot()
    text = ElementTree.tostring(root, encoding="unicode")
    assert root.tag.endswith("svg")
    # One line per policy and both bounds, with axes and ticks.
    for name in ("fcfs", "lpm", "dfs-no-aging", "clairvoyant", "infinite"):
        assert name in text, name


def test_everything_refused() -> None:
    reports = run_study(_workload(), [parse_policy("lpm")], [16], COST).reports
    assert reports[0].refused == 40 and reports[0].hit_rate == 0.0


def test_sizes() -> None:
    assert default_sizes(_workload()) == [1 << power for power in range(16, 22)]
    assert [short(n) for n in (0, 999, 1500, 2_000_000, 3 * 10**9)] == [
        "0",
        "999",
        "1.5k",
        "2M",
        "3G",
    ]
