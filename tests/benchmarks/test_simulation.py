"""Around `rootlace simulate`: fitted costs and made-up traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_cost import NAMES, features, fit
from benchmarks.synthetic_traces import write_trace
from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.simulation.bounds import infinite_bound
from rootlace.runtime.simulation.trace import read_trace
from rootlace.runtime.simulation.workload import Load, Workload
from rootlace.wire.protocol import SamplingParams


def _steps(dice: np.random.Generator, count: int) -> np.ndarray:
    rows = np.ones((count, len(NAMES)))
    rows[:, 1] = dice.integers(0, 2048, count)
    rows[:, 2] = dice.integers(0, 64, count)
    rows[:, 3] = rows[:, 2] * dice.integers(10, 4000, count)
    rows[:, 4] = rows[:, 1] * dice.integers(1, 4000, count)
    return rows


def test_a_fit_finds_what_made_the_figures() -> None:
    rows = _steps(np.random.default_rng(1), 60)
    true = np.array([5e-3, 3e-5, 2e-4, 4e-8, 1e-9])
    found = fit(rows, rows @ true, max_step_tokens=512, source="test")
    assert [getattr(found.cost, name) for name in NAMES] == pytest.approx(true.tolist(), rel=1e-6)
    assert found.r_squared == pytest.approx(1.0) and found.error < 1e-9 and found.steps == 60
    assert found.cost.max_step_tokens == 512 and found.cost.source == "test"


def test_a_fit_of_noise_has_no_negative_costs() -> None:
    dice = np.random.default_rng(2)
    rows = _steps(dice, 60)
    seconds = (rows @ np.array([5e-3, 3e-5, 0, 0, 0])) * dice.uniform(0.8, 1.2, 60)
    found = fit(rows, seconds)
    assert all(getattr(found.cost, name) >= 0 for name in NAMES)
    assert found.cost.step == pytest.approx(5e-3, rel=0.2)
    assert found.cost.prefill == pytest.approx(3e-5, rel=0.2)
    assert 0.7 < found.r_squared < 1


def test_features_of_a_step() -> None:
    scheduler = Scheduler(SchedulerConfig(max_step_tokens=8), CacheConfig(4, 64), 100)
    for rid, length in enumerate((3, 11)):
        ids = np.arange(length, dtype=np.int32) + 100 * rid
        scheduler.add(Request(rid, ids, SamplingParams(max_tokens=4, seed=0)))
    plan = scheduler.plan()
    assert plan is not None
    # 3 tokens that attend to 1.5 on average, and 5 of 11 that attend to 2.5.
    assert features(plan) == [1.0, 8.0, 0.0, 0.0, 3 * 1.5 + 5 * 2.5]


def test_a_made_up_trace_is_read_and_repeats(tmp_path: Path) -> None:
    paths = [tmp_path / str(which) for which in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        write_trace(300, seed, path)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    trace = read_trace(paths[0])
    assert len(trace) == 300 and trace.format == "mooncake"
    assert infinite_bound(Workload(trace, Load(granularity=32))) > 0.2
