"""A cache of a tenth of the reused prefixes, with a disk below it and without.

Long prefixes recur in random order, each with a new question, one request at a time. The first
round is not counted, because it fills the disk. Before each round the system drops its cached pages
of the disk's file, so that each block is read from the disk.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

import rootlace as rl
from benchmarks.common import ForeignLoad, new_table
from benchmarks.peers.raw_requests import RawRequests
from benchmarks.peers.workloads import Request
from benchmarks.random_models import SPECIAL_TOKENS
from rootlace.runtime.offload.disk_store import BLOCKS

WITH, WITHOUT = "with a disk", "without"
QUESTION, WANTED, BLOCK = 16, 8, 16
PREFIXES = 12
"""Fewer would have a tenth of them that one request does not fit into."""
DESCRIBE = (
    f"{PREFIXES} prefixes in random order, one request at a time, {QUESTION} tokens of its own and "
    f"{WANTED} generated; the KV pool holds a tenth of the prefixes"
)


@dataclass(frozen=True)
class Summary:
    """Counted requests of one runtime; `seconds` from submitting a request to its end."""

    size: str
    tier: str
    prefix_tokens: int
    pool_blocks: int
    requests: int
    seconds_median: float
    ttft_mean: float
    hit_rate: float
    foreign_cores: float
    counters: dict[str, Any] = field(repr=False)


def pool_blocks(prefix_tokens: int) -> int:
    """Return blocks for a tenth of the prefixes, but enough for a request."""
    least = -(-(prefix_tokens + QUESTION + WANTED) // BLOCK) + 1
    return max(PREFIXES * prefix_tokens // 10 // BLOCK, least)


@contextmanager
def runtimes(
    model: Path, prefix_tokens: int, disk: Path, **options: Any
) -> Iterator[dict[str, rl.Runtime]]:
    """Start both runtimes, which differ only in the disk."""
    options |= {"block_size": BLOCK, "num_blocks": pool_blocks(prefix_tokens)}
    with (
        rl.Runtime(model, cache_disk=str(disk), **options) as below,
        rl.Runtime(model, **options) as alone,
    ):
        yield {WITH: below, WITHOUT: alone}


def measure(
    size: str,
    model: Path,
    prefix_tokens: int,
    rounds: int,
    progress: Callable[[str], None],
    **options: Any,
) -> list[Summary]:
    """Measure both runtimes, in turns by round."""
    order = random.Random(0)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]

    def made_up(count: int) -> list[int]:
        return [order.randrange(len(SPECIAL_TOKENS), vocab_size) for _ in range(count)]

    prefixes = [made_up(prefix_tokens) for _ in range(PREFIXES)]
    took: dict[str, list[tuple[float, float, int]]] = {WITH: [], WITHOUT: []}
    loads: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    with (
        tempfile.TemporaryDirectory() as disk,
        runtimes(model, prefix_tokens, Path(disk), **options) as both,
    ):
        engines = {name: RawRequests(one.endpoint) for name, one in both.items()}
        for turn in range(rounds + 1):
            order.shuffle(prefixes)
            prompts = [prefix + made_up(QUESTION) for prefix in prefixes]
            for name, engine in engines.items():
                if name == WITH:
                    forget_pages(Path(disk))
                load = ForeignLoad()
                found = [_ask(engine, prompt) for prompt in prompts]
                if turn:
                    took[name] += found
                    loads[name].append(load.cores())
                progress(f"evicted prefixes, {name}, round {turn} of {rounds}")
        counters = {name: _counters(one) for name, one in both.items()}
    return [
        Summary(
            size=size,
            tier=name,
            prefix_tokens=prefix_tokens,
            pool_blocks=pool_blocks(prefix_tokens),
            requests=len(found),
            seconds_median=median(whole for whole, _, _ in found),
            ttft_mean=mean(first for _, first, _ in found),
            hit_rate=sum(cached for _, _, cached in found) / (len(found) * len(prompts[0])),
            foreign_cores=max(loads[name]),
            counters=counters[name],
        )
        for name, found in took.items()
    ]


def forget_pages(disk: Path) -> None:
    """Ask the system to drop its cached pages, so that the next reads come from the disk."""
    for path in disk.rglob(BLOCKS):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _ask(engine: RawRequests, prompt: list[int]) -> tuple[float, float, int]:
    """Return seconds until the end and until the first token, and the number of cached tokens."""
    before = engine.cached()
    begun = time.perf_counter()
    engine.add(Request("one", prompt, WANTED))
    first = 0.0
    while True:
        for news in engine.step():
            first = first or news.at - begun
            if news.finished:
                return news.at - begun, first, engine.cached() - before


def _counters(runtime: rl.Runtime) -> dict[str, Any]:
    names = ("disk_", "restored", "evicted", "computed")
    found = runtime.get_server_info()
    return {name: value for name, value in found.items() if name.startswith(names)}


def evicted_table(summaries: list[Summary]) -> Table:
    """Return the table; `gain`: how much faster a request ends."""
    about = summaries[0]
    table = new_table(
        f"Prefixes of {about.prefix_tokens} tokens, cache of a tenth, model {about.size}",
        *("disk", "s/request", "gain", "TTFT ms", "hits"),
    )
    without = next(one for one in summaries if one.tier == WITHOUT)
    for one in summaries:
        gain = without.seconds_median / one.seconds_median
        table.add_row(
            one.tier,
            f"{one.seconds_median:.3f}",
            f"{gain:.2f}x" if one.tier == WITH else "",
            f"{one.ttft_mean * 1e3:.0f}",
            f"{one.hit_rate:.1%}",
        )
    return table
