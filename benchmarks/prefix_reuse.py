"""What reuse of prefixes is worth: five loads, cache on and off, in one run.

    python -m benchmarks.prefix_reuse --json benchmarks/results/prefix_reuse.json

Two runtimes of the same random model stand side by side, one with the cache and one without, and
take turns, so that whatever else slows the machine down slows both. Each repetition has its own
seed and starts with an empty cache. Printed per load: requests and output tokens per second, time
to first token (from handing a request over until its client has the token), the hit rate and the
best one any prefix cache could have had; and the share of the engine's time that is not the
model's, which says what the tree costs where nothing is shared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import rootlace as rl
from benchmarks.common import ForeignLoad, Report, new_table, percentile, progress_bar
from benchmarks.ideal_cache import ideal_hits
from benchmarks.peers.drive import drive
from benchmarks.peers.raw_requests import RawRequests
from benchmarks.peers.workloads import WORKLOADS, Workload

LOADS = {"few-shot": "W1", "chat": "W2", "tree-search": "W3", "long-docs": "W5", "no-sharing": "W4"}
"""By the names of the peers' workloads."""

DEFAULT_SCALE = {"a": 1.0, "b": 0.125}
"""Of the number of requests: the bigger model gets fewer, so that a run ends within minutes."""

QUICK_SCALE = {"a": 0.125, "b": 0.03}
KV_BYTES = 1 << 30
"""Of each runtime's cache."""


@dataclass(frozen=True)
class Run:
    """One load, once, on one runtime. Seconds, tokens, and cores that other programs kept busy."""

    wall: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ideal_cached_tokens: int
    output_tokens: int
    engine_busy: float
    engine_model: float
    cpu: float
    foreign_cores: float
    first_token: list[float]


class Subject:
    """A runtime, with or without the cache, and one connection to it."""

    def __init__(self, runtime: rl.Runtime) -> None:
        self._runtime = runtime
        self._requests = RawRequests(runtime.endpoint)

    def run(self, workload: Workload) -> Run:
        """Empty the cache, and do the workload."""
        before, load = self._runtime.get_server_info(), ForeignLoad()
        driven = drive(self._requests, workload)
        foreign_cores, cpu = load.cores(), load.own_seconds()
        after = self._runtime.get_server_info()
        return Run(
            wall=driven.wall,
            requests=len(driven.outputs),
            prompt_tokens=driven.prompt_tokens,
            cached_tokens=driven.cached or 0,
            ideal_cached_tokens=ideal_hits(workload, driven.outputs),
            output_tokens=sum(map(len, driven.outputs.values())),
            engine_busy=after["engine_busy_seconds"] - before["engine_busy_seconds"],
            engine_model=after["engine_model_seconds"] - before["engine_model_seconds"],
            cpu=cpu,
            foreign_cores=foreign_cores,
            first_token=driven.ttft,
        )


@dataclass(frozen=True)
class Summary:
    """All repetitions of one load on one runtime. Rates are of the median repetition.

    `overhead_share`: of the engine's busy time, what is not the model: planning, tree, messages.
    `cpu_per_request`: CPU seconds of everything of ours; steadier than rates where other programs
    run as well.
    """

    size: str
    load: str
    cache: bool
    requests_per_second: float
    output_tokens_per_second: float
    ttft_mean: float
    ttft_p99: float
    hit_rate: float
    ideal_hit_rate: float
    overhead_share: float
    cpu_per_request: float
    foreign_cores: float
    repetitions: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def of(cls, size: str, load: str, cache: bool, runs: Sequence[Run]) -> Summary:
        waits = [wait for run in runs for wait in run.first_token]
        busy, model = sum(r.engine_busy for r in runs), sum(r.engine_model for r in runs)
        prompt = sum(run.prompt_tokens for run in runs)
        return cls(
            size=size,
            load=load,
            cache=cache,
            requests_per_second=median(run.requests / run.wall for run in runs),
            output_tokens_per_second=median(run.output_tokens / run.wall for run in runs),
            ttft_mean=mean(waits),
            ttft_p99=percentile(waits, 0.99),
            hit_rate=sum(run.cached_tokens for run in runs) / prompt,
            ideal_hit_rate=sum(run.ideal_cached_tokens for run in runs) / prompt,
            overhead_share=(busy - model) / busy if busy else 0.0,
            cpu_per_request=median(run.cpu / run.requests for run in runs),
            foreign_cores=max(run.foreign_cores for run in runs),
            repetitions=[
                {name: value for name, value in asdict(run).items() if name != "first_token"}
                for run in runs
            ],
        )


@contextmanager
def subjects(model: Path, **options: Any) -> Iterator[dict[bool, Subject]]:
    """The same model twice, by whether it has the cache."""
    with (
        rl.Runtime(model, cache=True, **options) as on,
        rl.Runtime(model, cache=False, **options) as off,
    ):
        yield {True: Subject(on), False: Subject(off)}


def measure(
    size: str, model: Path, arguments: argparse.Namespace, progress: Progress
) -> list[Summary]:
    """Every load on both runtimes, in turns."""
    scale = arguments.scale or (QUICK_SCALE if arguments.quick else DEFAULT_SCALE)[size]
    task = progress.add_task(size, total=2 * arguments.repetitions * len(arguments.loads))
    runs: dict[tuple[str, bool], list[Run]] = {}
    options = {"dtype": arguments.dtype, "threads": arguments.threads}
    with subjects(model, kv_memory_bytes=KV_BYTES, **options) as by_cache:
        for subject in by_cache.values():
            subject.run(Workload("W4", "warm-up", 0.05))
        for load in arguments.loads:
            for repetition in range(arguments.repetitions):
                # Who goes first alternates: neither always follows the other's heat.
                for cache in (True, False) if repetition % 2 == 0 else (False, True):
                    progress.update(task, description=f"{size} {load}")
                    workload = Workload(LOADS[load], repetition, scale)
                    runs.setdefault((load, cache), []).append(by_cache[cache].run(workload))
                    progress.advance(task)
    progress.remove_task(task)
    return [Summary.of(size, load, cache, found) for (load, cache), found in runs.items()]


COLUMNS = ("load", "req/s", "tok/s", "gain", "CPU gain", "TTFT", "p99", "hits", "best", "host")


def reuse_table(size: str, summaries: Sequence[Summary]) -> Table:
    title = f"Prefix reuse, model {size} (TTFT in ms; best: hits possible; host: not the model)"
    table = new_table(title, *COLUMNS)
    without = {summary.load: summary for summary in summaries if not summary.cache}
    for summary in summaries:
        other, cache = without[summary.load], summary.cache
        gain = summary.requests_per_second / other.requests_per_second
        cpu_gain = other.cpu_per_request / summary.cpu_per_request
        table.add_row(
            summary.load if cache else "  cache off",
            f"{summary.requests_per_second:.2f}",
            f"{summary.output_tokens_per_second:.1f}",
            f"{gain:.2f}x" if cache else "",
            f"{cpu_gain:.2f}x" if cache else "",
            f"{summary.ttft_mean * 1e3:.0f}",
            f"{summary.ttft_p99 * 1e3:.0f}",
            f"{summary.hit_rate:.1%}" if cache else "",
            f"{summary.ideal_hit_rate:.1%}" if cache else "",
            f"{summary.overhead_share:.1%}",
            end_section=not cache,
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix_reuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--json", type=Path, metavar="FILE", help="write everything here")
    option("--plot", type=Path, metavar="FILE.svg", help="draw the speed-ups here")
    option("--sizes", nargs="+", choices=["a", "b"], help="~15M, ~150M parameters")
    option("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    option("--quick", action="store_true", help="a few requests, once, size a only")
    option("--repetitions", type=int, help="of each load (default 3, quick 1)")
    option("--scale", type=float, help="factor on the number of requests")
    option("--dtype", choices=["float32", "bfloat16"], default="float32")
    option("--threads", type=int, help="of the engine (default: all cores)")
    option("--models", type=Path, metavar="DIR", help="holds a and b, or they are made there")
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or (["a"] if arguments.quick else ["a", "b"])
    arguments.repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    from benchmarks.random_models import MODELS, make_model

    console, report = Console(), Report("prefix_reuse")
    summaries: list[Summary] = []
    with progress_bar(console) as progress:
        for size in arguments.sizes:
            model = make_model(size, (arguments.models or MODELS) / size)
            summaries += measure(size, model, arguments, progress)
    for size in arguments.sizes:
        console.print(reuse_table(size, [s for s in summaries if s.size == size]))
    busiest = max(summary.foreign_cores for summary in summaries)
    if busiest > 0.1:
        console.print(
            f"[yellow]Other programs kept up to {busiest:.1f} cores busy meanwhile: "
            "compare on with off, do not take the absolute figures.[/]"
        )
    # Where files lie says nothing about the measurement.
    options = {k: str(v) for k, v in vars(arguments).items() if k not in ("json", "plot", "models")}
    report.add("options", options)
    report.add("loads", {load: WORKLOADS[LOADS[load]].describe for load in arguments.loads})
    report.add("results", summaries)
    report.write(arguments.json)
    if arguments.plot:
        from benchmarks.plot import plot_speed_ups

        plot_speed_ups(report.found["results"], arguments.plot)


if __name__ == "__main__":
    main()
