"""The benchmark of the host runs, counts what it says it counts, and leaves the model out."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.host_overhead import __main__ as host_overhead
from benchmarks.host_overhead import stack
from benchmarks.streams import __main__ as streams
from benchmarks.streams.servers import Server


@pytest.fixture(scope="module")
def running(demo_model: Path) -> Iterator[stack.Stack]:
    with stack.started(demo_model) as found:
        yield found


@pytest.mark.parametrize("mode", ["programs, 8,000 ids", "http, streamed"])
def test_the_whole_stack(running: stack.Stack, mode: str) -> None:
    before = running.cpu()
    cost = stack.measure_stack(running, mode, 2, 1)
    after = running.cpu()
    assert cost.mode == mode and cost.rows == 2
    parts = ("engine", "plan", "commit", "gateway", "client")
    assert all(after[part] > before[part] for part in parts)
    assert cost.total == pytest.approx(cost.engine + cost.gateway + cost.client)


def test_results_are_written(
    running: stack.Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_overhead, "started", lambda model: nullcontext(running))
    file = tmp_path / "host.json"
    arguments = ["--modes", "http", "--rows", "2", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["host_overhead", *arguments])
    host_overhead.main()
    report = json.loads(file.read_text())
    assert report["benchmark"] == "host_overhead" and report["machine"]["cores"]
    assert [(cost["mode"], cost["rows"]) for cost in report["stack"]] == [("http", 2)]


def test_streams_are_counted(running: stack.Stack) -> None:
    """Each token is told once, and events and CPU time are those of the tokens."""
    cost = streams.measure(Server(running.url, "", running.gateway), 2, 1)
    assert 0 < cost.events <= 100
    assert cost.streams == 2 and cost.rate > 0
