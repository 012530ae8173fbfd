"""What reuse of prefixes is worth: five loads, cache on and off, in one run.

    python -m benchmarks.prefix_reuse --json benchmarks/results/prefix_reuse.json

Two runtimes of the same random model stand side by side, one with the cache and one without, and
take turns, so that whatever else slows the machine down slows both. Each repetition has its own
seed and starts with an empty cache. Printed per load: requests and output tokens per second, time
to first token (measured by the runtime, from the request's arrival), the hit rate and the best one
any prefix cache could have had; and the share of the engine's time that is not the model's, which
says what the tree costs where nothing is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
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
from benchmarks.ideal_cache import IdealCache
from benchmarks.peers.workloads import (
    Chat,
    FewShot,
    LongDocuments,
    NothingShared,
    Request,
    TreeSearch,
    Workload,
)

LOADS: dict[str, type[Workload]] = {
    "few-shot": FewShot,
    "chat": Chat,
    "tree-search": TreeSearch,
    "long-docs": LongDocuments,
    "no-sharing": NothingShared,
}

DEFAULT_SCALE = {"a": 1.0, "b": 0.125}
"""Of the number of requests: the bigger model gets fewer, so that a run ends within minutes."""

QUICK_SCALE = {"a": 0.125, "b": 0.03}
KV_BYTES = 1 << 30
"""Of each runtime's cache."""


@dataclass(frozen=True)
class Run:
    """One load, once, on one runtime. Seconds, and tokens."""

    wall: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ideal_hit_rate: float
    engine_busy: float
    engine_model: float
    cpu: float
    foreign_cores: float
    first_token: list[float]


async def run_load(engine: rl.Engine, load: Workload) -> Run:
    """Send all first requests at once, each follow-up as soon as its answer is there."""
    ideal = IdealCache()
    metas: list[dict[str, Any]] = []

    async def ask(request: Request) -> None:
        ideal.submit(request.prompt)
        sampling = {"temperature": 0, "max_new_tokens": request.wanted, "ignore_eos": True}
        reply = await engine.async_generate(input_ids=request.prompt, sampling_params=sampling)
        output = list(reply["output_ids"])
        if len(output) != request.wanted:
            raise RuntimeError(f"asked for {request.wanted} tokens, got {len(output)}")
        ideal.finish(request.prompt, output)
        metas.append(reply["meta_info"])
        await ask_all(load.answered(request, output))

    async def ask_all(requests: Sequence[Request]) -> None:
        await asyncio.gather(*(ask(request) for request in requests))

    first = load.start()
    before, foreign, start = engine.get_server_info(), ForeignLoad(), time.perf_counter()
    await ask_all(first)
    wall = time.perf_counter() - start
    foreign_cores, cpu = foreign.cores(), foreign.own_seconds()
    after = engine.get_server_info()
    return Run(
        wall=wall,
        requests=len(metas),
        prompt_tokens=sum(meta["prompt_tokens"] for meta in metas),
        cached_tokens=sum(meta["cached_tokens"] for meta in metas),
        output_tokens=sum(meta["completion_tokens"] for meta in metas),
        ideal_hit_rate=ideal.hit_rate,
        first_token=[meta["time_to_first_token"] for meta in metas],
        engine_busy=after["engine_busy_seconds"] - before["engine_busy_seconds"],
        engine_model=after["engine_model_seconds"] - before["engine_model_seconds"],
        cpu=cpu,
        foreign_cores=foreign_cores,
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
            ideal_hit_rate=sum(run.ideal_hit_rate * run.prompt_tokens for run in runs) / prompt,
            overhead_share=(busy - model) / busy if busy else 0.0,
            cpu_per_request=median(run.cpu / run.requests for run in runs),
            foreign_cores=max(run.foreign_cores for run in runs),
            repetitions=[
                {name: value for name, value in asdict(run).items() if name != "first_token"}
                for run in runs
            ],
        )


@contextmanager
def engines(model: Path, **options: Any) -> Iterator[dict[bool, rl.Engine]]:
    """The same model twice, by whether it has the cache."""
    with (
        rl.Engine(model_path=model, cache=True, **options) as on,
        rl.Engine(model_path=model, cache=False, **options) as off,
    ):
        yield {True: on, False: off}


def measure(
    size: str, model: Path, arguments: argparse.Namespace, progress: Progress
) -> list[Summary]:
    """Every load on both runtimes, in turns."""
    scale = arguments.scale or (QUICK_SCALE if arguments.quick else DEFAULT_SCALE)[size]
    task = progress.add_task(size, total=2 * arguments.repetitions * len(arguments.loads))
    summaries = []
    with engines(
        model, dtype=arguments.dtype, threads=arguments.threads, kv_memory_bytes=KV_BYTES
    ) as by_cache:
        vocab = by_cache[True].endpoint.model_info.vocab_size
        for engine in by_cache.values():
            asyncio.run(run_load(engine, NothingShared("warm-up", 0.05, vocab)))
        for load in arguments.loads:
            runs: dict[bool, list[Run]] = {True: [], False: []}
            for repetition in range(arguments.repetitions):
                # Who goes first alternates: neither always follows the other's heat.
                for cache in (True, False) if repetition % 2 == 0 else (False, True):
                    progress.update(task, description=f"{size} {load}")
                    by_cache[cache].flush_cache()
                    workload = LOADS[load](repetition, scale, vocab)
                    runs[cache].append(asyncio.run(run_load(by_cache[cache], workload)))
                    progress.advance(task)
            summaries += [Summary.of(size, load, cache, runs[cache]) for cache in runs]
    progress.remove_task(task)
    return summaries


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
    # Not at the top: making a model needs torch, looking at --help does not.
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
    report.add("loads", {name: LOADS[name].describe for name in arguments.loads})
    report.add("results", summaries)
    report.write(arguments.json)
    if arguments.plot:
        from benchmarks.plot import plot_speed_ups

        plot_speed_ups(report.found["results"], arguments.plot)


if __name__ == "__main__":
    main()
