"""What the tree costs where it gains nothing: seconds inside it, of all seconds.

Scheduler and model run here in this process, without gateway or sockets, as the engine's loop runs
them. The pool is smaller than the load, so that eviction has its part. The same load runs a second
time without the cache: what is left of planning then is what any continuous batching needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loads import Source
from rootlace.runtime.config import CacheConfig, ExecutorConfig, SchedulerConfig
from rootlace.wire.protocol import SamplingParams

REQUESTS = {"a": 64, "b": 16}
PROMPT_TOKENS, OUTPUT_TOKENS, BATCH = 256, 64, 16
POOL_REQUESTS = BATCH + 4
"""How many requests the pool holds: with more than that in all, old ones are evicted."""

TREE_METHODS = (
    "descend", "match", "fill_table", "enter", "advance", "insert", "leave", "evict",
    "open_program", "close_program",
)  # fmt: skip


@dataclass(frozen=True)
class TreeCost:
    """Seconds: in the tree, in the scheduler (tree included), and in all; then without cache."""

    size: str
    steps: int
    wall: float
    tree: float
    scheduling: float
    evicted_blocks: int
    wall_without: float
    scheduling_without: float


class Stopwatch:
    """Adds up the time inside wrapped methods; calls among them are counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return timed


def measure_tree_cost(size: str, model: Path, arguments: argparse.Namespace) -> TreeCost:
    import torch

    # Late, as in the engine: importing torch takes seconds.
    from rootlace.runtime.model.executor.runner import ModelRunner

    block_size = arguments.block_size or CacheConfig().block_size
    tokens = POOL_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS)
    cache = CacheConfig(block_size=block_size, num_blocks=-(-tokens // block_size))
    scheduling = SchedulerConfig(max_running=BATCH)
    threads = torch.get_num_threads()
    try:
        runner = ModelRunner.load(
            ExecutorConfig(
                model=str(model),
                dtype=arguments.dtype,
                threads=arguments.threads,
                device=arguments.device or "auto",
            ),
            cache,
            max_step_tokens=scheduling.max_step_tokens,
            max_running=scheduling.max_running,
        )
        count = REQUESTS[size] // (2 if arguments.quick else 1)
        # Once for nothing: the first steps allocate and choose kernels.
        _run(runner, cache, scheduling, 2, "warm-up")
        on = _run(runner, cache, scheduling, count, "measured")
        off_cache = CacheConfig(block_size, cache.num_blocks, enabled=False)
        off = _run(runner, off_cache, scheduling, count, "measured")
    finally:
        torch.set_num_threads(threads)
    return TreeCost(
        size=size,
        steps=on.steps,
        wall=on.wall,
        tree=on.tree,
        scheduling=on.scheduling,
        evicted_blocks=on.evicted,
        wall_without=off.wall,
        scheduling_without=off.scheduling,
    )


@dataclass(frozen=True)
class _Measured:
    steps: int
    wall: float
    tree: float
    scheduling: float
    evicted: int


def _run(
    runner: Any, cache: CacheConfig, config: SchedulerConfig, count: int, seed: str
) -> _Measured:
    from rootlace.runtime.contracts.request import Request
    from rootlace.runtime.scheduler.scheduler import Scheduler

    scheduler = Scheduler(config, cache, runner.context_length, vocab_size=runner.vocab_size)
    watch = Stopwatch()
    tree = scheduler.kv.tree
    for name in TREE_METHODS:
        setattr(tree, name, watch.wrap(getattr(tree, name)))
    source = Source(f"tree-cost/{seed}", runner.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, seed=0, ignore_eos=True)
    for rid in range(count):
        prompt = np.asarray(source.tokens(PROMPT_TOKENS), dtype=np.int32)
        scheduler.add(Request(rid=rid, token_ids=prompt, params=params))
    steps, scheduling, start = 0, 0.0, time.perf_counter()
    watch.seconds = 0.0
    while True:
        before = time.perf_counter()
        plan = scheduler.plan()
        scheduling += time.perf_counter() - before
        if plan is None:
            break
        result = runner.run(plan)
        before = time.perf_counter()
        scheduler.commit(plan, result)
        scheduling += time.perf_counter() - before
        steps += 1
    wall = time.perf_counter() - start
    return _Measured(steps, wall, watch.seconds, scheduling, tree.evicted_blocks)
