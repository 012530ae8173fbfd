"""What tree and scheduler cost: `python -m benchmarks.tree [--json FILE]`.

First `match`, `insert` and `evict` on 4,096-token prompts in a tree of 10,000 nodes and more than a
million tokens; then `plan` + `commit` per decode step, over rows and context. Medians, in
CPU microseconds of one thread (waiting for the processor does not count); no model runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rootlace.runtime.cache import BlockPool, RadixTree
from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.plan import StepPlan, StepResult
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import SamplingParams

PROMPT = 4096
BLOCK_SIZES = (1, 16)
ROWS = (1, 16, 64, 256)
CONTEXTS = (1024, 32768)
VOCAB = 32000


def microseconds(action: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - started) / 1000


class Cache:
    """A tree of at least `nodes` nodes: documents, their forks, and 256 long prompts."""

    def __init__(self, block_size: int, nodes: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.block_size = block_size
        self.tree = RadixTree(BlockPool(8 * 2**20 // block_size, block_size))
        self.prompts: list[np.ndarray] = []
        while self.tree.num_nodes < nodes or len(self.prompts) < 256:
            if len(self.prompts) < 256:
                self.prompts.append(self.fresh(PROMPT))
                self.store(self.prompts[-1])
            base = self.prompts[int(self.random.integers(len(self.prompts)))]
            cut = int(self.random.integers(1, PROMPT))
            self.store(np.concatenate((base[:cut], self.fresh(32))))

    def fresh(self, count: int) -> np.ndarray:
        return self.random.integers(0, VOCAB, count, dtype=np.int32)

    def store(self, tokens: np.ndarray) -> None:
        """What a request does to the tree: lock, take blocks, insert, unlock."""
        tree, pool, size = self.tree, self.tree.pool, self.block_size
        node = tree.advance(tree.enter(""), tokens, len(tokens))
        first = node.end // size
        table = np.zeros(-(-len(tokens) // size), np.int32)
        mine = pool.allocate(len(table) - first)
        table[first:] = mine
        node = tree.insert(node, tokens, len(tokens), table)
        pool.drop(mine, pinned=True)
        tree.leave(node)


def measure_tree(block_size: int, nodes: int, repeats: int) -> dict[str, float]:
    cache = Cache(block_size, nodes)
    tree = cache.tree
    hits, misses, inserts, evictions = [], [], [], []
    sizes = {"nodes": tree.num_nodes, "tokens": tree.num_tokens}
    for i in range(repeats):
        known = cache.prompts[i % len(cache.prompts)]
        hits.append(microseconds(partial(tree.match, "", known)))
        new = np.concatenate((known[: PROMPT // 2], cache.fresh(PROMPT // 2)))
        misses.append(microseconds(partial(tree.match, "", new)))
        inserts.append(microseconds(partial(cache.store, new)))
    per_prompt = PROMPT // 2 // block_size
    for _ in range(repeats):
        evictions.append(microseconds(partial(tree.evict, per_prompt)))
    return {
        "block_size": block_size,
        **sizes,
        "match_full_us": statistics.median(hits),
        "match_half_us": statistics.median(misses),
        "insert_half_us": statistics.median(inserts),
        "evict_half_us": statistics.median(evictions),
    }


def no_model(plan: StepPlan) -> StepResult:
    return StepResult(
        np.full(len(plan.samples), 7, np.int32),
        [None] * len(plan.samples),
        [],
    )


def measure_steps(rows: int, context: int, repeats: int) -> dict[str, float]:
    """Decode steps of `rows` requests that share half of their context."""
    size = 16
    blocks = (rows + 2) * (context + repeats + 64) // size + rows
    scheduler = Scheduler(
        SchedulerConfig(max_step_tokens=2**22, max_running=rows),
        CacheConfig(block_size=size, num_blocks=blocks),
        context_length=2 * context + repeats,
    )
    random = np.random.default_rng(0)
    shared = random.integers(0, VOCAB, context // 2, dtype=np.int32)
    params = SamplingParams(max_tokens=repeats + 8, seed=0)
    for rid in range(rows):
        own = random.integers(0, VOCAB, context - len(shared), dtype=np.int32)
        scheduler.add(Request(rid, np.concatenate((shared, own)), params))

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, no_model(plan))

    prefill = microseconds(step)
    times = [microseconds(step) for _ in range(repeats)]
    return {
        "rows": rows,
        "context": context,
        "prefill_us": prefill,
        "decode_us": statistics.median(times),
        "decode_us_per_row": statistics.median(times) / rows,
    }


def show(title: str, results: list[dict[str, float]], console: Console) -> None:
    table = Table(title=title)
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="right")  # narrow terminals break lines
    for result in results:
        table.add_row(*(f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" for v in result.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    tree = [measure_tree(size, args.nodes, args.repeats) for size in BLOCK_SIZES]
    steps = [measure_steps(r, c, args.repeats) for c in CONTEXTS for r in ROWS]
    console = Console()
    show(f"Tree, {PROMPT:,}-token prompts (half: 2,048 of them cached)", tree, console)
    show("Plan and commit of one step", steps, console)
    if args.json:
        report: dict[str, Any] = {
            "benchmark": "tree",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tree": tree,
            "steps": steps,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
