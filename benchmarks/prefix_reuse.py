"""Gain by reuse of prefixes: five loads, cache on and off, in one run.

    python -m benchmarks.prefix_reuse --json benchmarks/results/prefix_reuse.json

Two runtimes of the same random model, one with the cache and one without, take turns at the
workloads of `benchmarks.peers`, so that other load of the machine slows both. Each repetition has
its own seed and starts with an empty cache. Printed per load: requests and output tokens per
second, CPU time per request, time to first token (from submitting a request until its client has
the token), the hit rate and the best hit rate of any prefix cache. The load `evicted`
(`evicted_prefixes`) is measured otherwise: a cache that is too small, with a disk below it and
without. A run of this load alone replaces its part of the file and keeps the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import rootlace as rl
from benchmarks import evicted_prefixes
from benchmarks.common import Report, new_table, progress_bar
from benchmarks.ideal_cache import ideal_hits
from benchmarks.peers.drive import drive
from benchmarks.peers.measure import Row, tasks_of
from benchmarks.peers.raw_requests import RawRequests
from benchmarks.peers.turns import Engine, here, parse, take_turns, turn_parser
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.random_models import make_model

LOADS = {"few-shot": "W1", "chat": "W2", "tree-search": "W3", "long-docs": "W5", "no-sharing": "W4"}
EVICTED = "evicted"
ON, OFF = "cache on", "cache off"
DEFAULT_SCALE = {"a": 1.0, "b": 0.125}
"""Of the number of requests: the bigger model gets fewer, so that a run ends within minutes."""
QUICK_SCALE = {"a": 0.125, "b": 0.03}
KV_BYTES = 1 << 30
"""Of each runtime's cache."""


@dataclass(frozen=True)
class Summary:
    """All repetitions of one load on one runtime. Rates are of the median repetition.

    `cpu_per_request`: CPU seconds of all our processes; steadier than rates beside other programs.
    """

    size: str
    load: str
    cache: bool
    requests_per_second: float
    output_tokens_per_second: float
    cpu_per_request: float
    ttft_mean: float
    hit_rate: float
    ideal_hit_rate: float
    foreign_cores: float
    repetitions: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def of(cls, load: str, rows: Sequence[Row], vocab_size: int) -> Summary:
        prompt = sum(row.prompt_tokens for row in rows)
        made = [Workload(row.workload, row.seed, row.scale, vocab_size) for row in rows]
        best = sum(ideal_hits(work, row.outputs) for work, row in zip(made, rows, strict=True))
        return cls(
            size=rows[0].model,
            load=load,
            cache=rows[0].engine == ON,
            requests_per_second=median(row.requests / row.wall_s for row in rows),
            output_tokens_per_second=median(row.output_tokens / row.wall_s for row in rows),
            cpu_per_request=median(row.cpu_s / row.requests for row in rows),
            ttft_mean=mean(row.ttft_mean_s or 0.0 for row in rows),
            hit_rate=sum(row.cached_tokens or 0 for row in rows) / prompt,
            ideal_hit_rate=best / prompt,
            foreign_cores=max(row.foreign_cores for row in rows),
            repetitions=[row.as_json() for row in rows],
        )


@contextmanager
def engines(model: Path, **options: Any) -> Iterator[list[Engine]]:
    """Start the same model twice: with the cache, and without."""
    with (
        rl.Runtime(model, cache=True, **options) as on,
        rl.Runtime(model, cache=False, **options) as off,
    ):
        pairs = ((ON, on), (OFF, off))
        yield [here(name, partial(drive, RawRequests(one.endpoint))) for name, one in pairs]


def measure(
    size: str, model: Path, arguments: argparse.Namespace, progress: Callable[[str], None]
) -> list[Summary]:
    """Measure every load on both runtimes, in turns."""
    scale = arguments.scale or (QUICK_SCALE if arguments.quick else DEFAULT_SCALE)[size]
    names = [LOADS[load] for load in arguments.loads]
    tasks = tasks_of(size, model, names, 0, arguments.repetitions, scale)
    options = {"dtype": arguments.dtype, "threads": arguments.threads}
    with engines(model, kv_memory_bytes=KV_BYTES, **options) as both:
        for engine in both:
            engine.run(Workload("W4", "warm-up", 0.05))
        rows = take_turns(both, tasks, {}, progress)
    return [
        Summary.of(load, found, tasks[0].vocab_size)
        for load in arguments.loads
        for name in (ON, OFF)
        if (found := [r for r in rows if (r.workload, r.engine) == (LOADS[load], name)])
    ]


COLUMNS = ("load", "req/s", "tok/s", "gain", "CPU gain", "TTFT ms", "hits", "best")


def reuse_table(size: str, summaries: Sequence[Summary]) -> Table:
    """Return the table; `best`: hits of an ideal cache."""
    table = new_table(f"Prefix reuse, model {size}", *COLUMNS)
    without = {summary.load: summary for summary in summaries if not summary.cache}
    for summary in summaries:
        other, cache = without[summary.load], summary.cache
        gains = (
            summary.requests_per_second / other.requests_per_second,
            other.cpu_per_request / summary.cpu_per_request,
        )
        table.add_row(
            summary.load if cache else "  cache off",
            f"{summary.requests_per_second:.2f}",
            f"{summary.output_tokens_per_second:.1f}",
            *(f"{gain:.2f}x" if cache else "" for gain in gains),
            f"{summary.ttft_mean * 1e3:.0f}",
            *(f"{r:.1%}" if cache else "" for r in (summary.hit_rate, summary.ideal_hit_rate)),
            end_section=not cache,
        )
    return table


def main() -> None:
    parser = turn_parser("prefix_reuse", __doc__, "float32")
    loads = [*LOADS, EVICTED]
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads)
    parser.add_argument("--prefix-tokens", type=int, default=4096, help="of the load evicted")
    arguments = parse(parser, None)
    console, report = Console(), Report("prefix_reuse", arguments)
    summaries: list[Summary] = []
    evicted: list[evicted_prefixes.Summary] = []
    with_evicted = EVICTED in arguments.loads
    arguments.loads = [load for load in arguments.loads if load != EVICTED]
    with progress_bar(console) as bar:
        task = bar.add_task("", total=None)
        for size in arguments.sizes:
            model = make_model(size, arguments.models / size)

            def tell(what: str) -> None:
                bar.update(task, description=what, advance=1)

            if arguments.loads:
                summaries += measure(size, model, arguments, tell)
            if with_evicted:
                options = {"dtype": arguments.dtype, "threads": arguments.threads}
                evicted += evicted_prefixes.measure(
                    *(size, model, arguments.prefix_tokens, arguments.repetitions, tell), **options
                )
    for size in arguments.sizes:
        if found := [s for s in summaries if s.size == size]:
            console.print(reuse_table(size, found))
        if below := [s for s in evicted if s.size == size]:
            console.print(evicted_prefixes.evicted_table(below))
    console.print(report.foreign_line())
    part = {"load": evicted_prefixes.DESCRIBE, "results": evicted}
    if not arguments.loads:  # keeps the file's other parts
        for name, value in part.items():
            report.add(name, value)
        report.write_part(EVICTED)
        return
    report.add("loads", {load: WORKLOADS[LOADS[load]].describe for load in arguments.loads})
    report.add("results", summaries)
    if with_evicted:
        report.add(EVICTED, part)
    report.write()
    if arguments.plot:
        from benchmarks.plot import plot_speed_ups

        plot_speed_ups(report.found["results"], arguments.plot)


if __name__ == "__main__":
    main()
