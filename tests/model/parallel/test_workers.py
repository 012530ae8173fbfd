"""Processes of ranks, without a model."""

import logging
import sys

import pytest

from rootlace.runtime import processes
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.parallel import ranks
from rootlace.runtime.model.parallel.ranks import WorkerConfig, Workers
from rootlace.wire.errors import InvalidRequest, ServerUnavailable

LOADS = """
import sys, time
for line in {lines!r}:
    print(line, flush=True)
time.sleep({seconds})
"""
LOADING, LOADED = '{"what":"loading"}', '{"what":"loaded"}'
WRONG = '{"what":"invalid_request","message":"no"}'


def wait(monkeypatch: pytest.MonkeyPatch, lines: list[str], seconds: float) -> None:
    program = LOADS.format(lines=lines, seconds=seconds)
    monkeypatch.setattr(processes, "child_command", lambda _: [sys.executable, "-c", program])
    config = WorkerConfig(ExecutorConfig(model="none"), CacheConfig(), 1, "file", ())
    found = Workers([config])
    try:
        found.wait_until_loaded()
    finally:
        found.close()


def test_a_rank_is_waited_for_as_long_as_it_says_that_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait(monkeypatch, [LOADING, LOADING, LOADED], 60)
    with pytest.raises(InvalidRequest, match="no"):
        wait(monkeypatch, [LOADING, WRONG], 60)
    with pytest.raises(ServerUnavailable, match="rank 1 ended with code 0"):
        wait(monkeypatch, [LOADING], 0)


def test_a_rank_that_stops_while_it_loads_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 0.01)
    with pytest.raises(ServerUnavailable, match="rank 1 said nothing for"):
        wait(monkeypatch, [], 60)


def test_ranks_are_told_how_their_engine_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    assert processes.format_in_force() == "text"
    handler.setFormatter(processes.JsonFormatter("engine"))
    assert processes.format_in_force() == "json"
