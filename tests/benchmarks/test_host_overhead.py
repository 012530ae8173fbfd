"""The benchmark of the host runs, counts what it says it counts, and leaves the model out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.host_overhead import __main__ as host_overhead
from benchmarks.host_overhead import engine_loop, stack


@pytest.mark.parametrize("streaming", [False, True])
def test_a_step_of_the_loop(streaming: bool) -> None:
    cost = engine_loop.measure_steps(3, 100, steps=20, rounds=1, streaming=streaming)
    parts = (cost.receive, cost.plan, cost.commit, cost.send, cost.loop)
    assert (cost.rows, cost.context) == (3, 100)
    assert all(part > 0 for part in parts[:4]) and cost.prefill > 0
    # `total` has other threads' time, too.
    assert sum(parts) <= 1.25 * cost.total
    assert cost.per_row == pytest.approx(cost.total / 3)


@pytest.mark.parametrize("mode", ["programs, 1,000 ids", "http, streamed"])
def test_the_whole_stack(demo_model: Path, mode: str) -> None:
    with stack.started(demo_model) as running:
        before = running.cpu()
        cost = stack.measure_stack(running, mode, 2, 1)
        after = running.cpu()
    assert cost.mode == mode and cost.rows == 2
    assert all(after[part] > before[part] for part in ("engine", "gateway", "client"))
    assert cost.total == pytest.approx(cost.engine + cost.gateway + cost.client)


def test_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "host.json"
    monkeypatch.setattr(host_overhead, "STEPS", [(2, 100)])
    arguments = ["--only", "steps", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["host_overhead", *arguments])
    host_overhead.main()
    report = json.loads(file.read_text())
    assert report["benchmark"] == "host_overhead" and report["machine"]["cores"]
    assert [(step["rows"], step["streaming"]) for step in report["steps"]] == [
        (2, True),
        (2, False),
    ]
