"""The benchmark on a real runtime: hits against the naive trie, and what the tree costs."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks.loads import LOADS
from benchmarks.prefix_reuse import Run, Summary, engines, reuse_table, run_load
from benchmarks.tree_cost import Stopwatch, measure_tree_cost

SCALE = 0.05
"""One conversation, one search, three few-shot questions, two requests with nothing in common."""


@pytest.fixture(scope="module")
def runs(demo_model: Path) -> dict[tuple[str, bool], Run]:
    """Each load that fits into the model's context, with the cache and without."""
    found = {}
    with engines(demo_model, {"threads": 1, "dtype": "float32"}) as by_cache:
        for name in ("few-shot", "chat", "tree-search", "no-sharing"):
            for cache, engine in by_cache.items():
                run = run_load(engine, LOADS[name], "test", 4096, SCALE)
                found[name, cache] = asyncio.run(run)
    return found


@pytest.mark.parametrize("name", ["few-shot", "chat", "tree-search", "no-sharing"])
def test_the_tree_is_as_good_as_any_cache(name: str, runs: dict[tuple[str, bool], Run]) -> None:
    run = runs[name, True]
    assert run.cached_tokens == pytest.approx(run.ideal_hit_rate * run.prompt_tokens, abs=1e-6)
    assert runs[name, False].cached_tokens == 0


def test_a_summary_and_its_table(runs: dict[tuple[str, bool], Run]) -> None:
    summaries = [Summary.of("a", name, cache, [run]) for (name, cache), run in runs.items()]
    assert reuse_table("a", summaries).row_count == len(runs)
    on = summaries[0]
    run = runs["few-shot", True]
    assert (on.load, on.cache) == ("few-shot", True)
    assert on.requests_per_second == run.requests / run.wall
    assert on.hit_rate == run.cached_tokens / run.prompt_tokens
    assert 0 < on.ttft_p50 <= on.ttft_p99


def test_tree_cost(demo_model: Path) -> None:
    options = argparse.Namespace(
        block_size=None, dtype="float32", threads=1, device=None, quick=True
    )
    cost = measure_tree_cost("b", demo_model, options)
    assert 0 < cost.tree < cost.scheduling < cost.wall
    assert 0 < cost.scheduling_without < cost.wall_without


def test_stopwatch_counts_nested_calls_once() -> None:
    watch = Stopwatch()
    inner = watch.wrap(lambda: sum(range(20_000)))
    seen = []

    def outer() -> None:
        inner()
        seen.append(watch.seconds)
        inner()

    watch.wrap(outer)()
    assert seen == [0.0]
    assert watch.seconds > 0
