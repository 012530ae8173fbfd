"""The benchmark on a real runtime: hits against the naive trie."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.common import Report
from benchmarks.peers.measure import Row, tasks_of
from benchmarks.peers.turns import take_turns
from benchmarks.prefix_reuse import LOADS, OFF, ON, Summary, engines, reuse_table

SCALE = 0.05
"""One conversation, one search, three few-shot questions, two requests with nothing in common."""
NAMES = ("few-shot", "chat", "tree-search", "no-sharing")
"""The loads that fit into the model's context."""


@pytest.fixture(scope="module")
def rows(demo_model: Path) -> dict[tuple[str, str], Row]:
    """Each load with the cache and without."""
    tasks = tasks_of("a", demo_model, [LOADS[name] for name in NAMES], 3, 1, SCALE)
    with engines(demo_model, threads=1, dtype="float32") as both:
        found = take_turns(both, tasks, {}, lambda done: None)
    return {(row.workload, row.engine): row for row in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_is_as_good_as_any_cache(name: str, rows: dict[tuple[str, str], Row]) -> None:
    on, off = (Summary.of(name, [rows[LOADS[name], engine]], 4096) for engine in (ON, OFF))
    assert on.hit_rate == on.ideal_hit_rate == off.ideal_hit_rate
    assert off.hit_rate == 0 and (on.hit_rate > 0 or name == "no-sharing")
    assert on.cache and not off.cache
    assert reuse_table("a", [on, off]).row_count == 2


def test_a_summary(rows: dict[tuple[str, str], Row]) -> None:
    row = rows["W1", ON]
    found = Summary.of("few-shot", [row], 4096)
    assert found.requests_per_second == row.requests / row.wall_s
    assert found.hit_rate == (row.cached_tokens or 0) / row.prompt_tokens
    assert found.cpu_per_request == row.cpu_s / row.requests > 0
    assert found.ttft_mean == row.ttft_mean_s


def test_what_is_measured_alone_leaves_the_rest_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "found.json"
    for value in (1, 2):
        report = Report("prefix_reuse", argparse.Namespace(json=path, loads=["evicted"]))
        report.add("results", [value])
        report.write_part("evicted")
    whole = json.loads(path.read_text())
    assert list(whole) == ["evicted"] and whole["evicted"]["results"] == [2]
    assert whole["evicted"]["options"] == {"loads": ["evicted"]} and whole["evicted"]["date"]
    path.write_text(json.dumps({"results": "kept", **whole}))
    report.write_part("evicted")
    assert json.loads(path.read_text())["results"] == "kept"
