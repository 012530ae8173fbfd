"""The benchmark on a real runtime: hits against the naive trie."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.workloads import Workload
from benchmarks.prefix_reuse import LOADS, Run, Summary, reuse_table, subjects

SCALE = 0.05
"""One conversation, one search, three few-shot questions, two requests with nothing in common."""


@pytest.fixture(scope="module")
def runs(demo_model: Path) -> dict[tuple[str, bool], Run]:
    """Each load that fits into the model's context, with the cache and without."""
    found = {}
    with subjects(demo_model, threads=1, dtype="float32") as by_cache:
        for name in ("few-shot", "chat", "tree-search", "no-sharing"):
            for cache, subject in by_cache.items():
                found[name, cache] = subject.run(Workload(LOADS[name], "test", SCALE, 4096))
    return found


@pytest.mark.parametrize("name", ["few-shot", "chat", "tree-search", "no-sharing"])
def test_the_tree_is_as_good_as_any_cache(name: str, runs: dict[tuple[str, bool], Run]) -> None:
    run = runs[name, True]
    assert 0 < run.cached_tokens == run.ideal_cached_tokens or name == "no-sharing"
    assert runs[name, False].cached_tokens == 0


def test_a_summary_and_its_table(runs: dict[tuple[str, bool], Run]) -> None:
    summaries = [Summary.of("a", name, cache, [run]) for (name, cache), run in runs.items()]
    assert reuse_table("a", summaries).row_count == len(runs)
    on = summaries[0]
    run = runs["few-shot", True]
    assert (on.load, on.cache) == ("few-shot", True)
    assert on.requests_per_second == run.requests / run.wall
    assert on.hit_rate == run.cached_tokens / run.prompt_tokens
    assert 0 < on.overhead_share < 1
    assert 0 < on.ttft_mean <= on.ttft_p99
