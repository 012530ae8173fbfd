"""Engines that have a model loaded and take turns at the workloads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import rootlace as rl
from benchmarks.common import ForeignLoad, new_parser
from benchmarks.peers import known_peers
from benchmarks.peers.completion_server import OpenAIServer
from benchmarks.peers.drive import Driven, PeerError, drive
from benchmarks.peers.measure import Row, Task, tasks_of
from benchmarks.peers.programs import drive_programs
from benchmarks.peers.raw_requests import RawRequests
from benchmarks.peers.report import PROGRAMS, RAW
from benchmarks.peers.workloads import Workload
from benchmarks.random_models import MODELS
from rootlace.kernels.native.machine import usable_cores

KV_GIB = 4
"""Of the KV cache, ours and a peer's where it can be set."""
WARM_UP_SCALE = 0.25
LIMIT = 300.0
"""Seconds that a peer may take to load, and for a workload."""
PATIENCE = 60.0
"""What took more seconds is not repeated."""


def turn_parser(benchmark: str, doc: str | None, dtype: str) -> argparse.ArgumentParser:
    """Make a parser with the options of benchmarks in which engines take turns."""
    parser = new_parser(benchmark, doc)
    option = parser.add_argument
    option("--plot", type=Path, metavar="FILE.svg", help="draw the ratios here")
    option("--models", type=Path, metavar="DIR", default=MODELS, help="holds a and b, or gets them")
    option("--sizes", nargs="+", choices=["a", "b"], help="~15M, ~150M parameters")
    option("--repetitions", type=int, help="each with the next seed (default 3, quick 1)")
    option("--scale", type=float, help="factor on the number of units, for every engine")
    option("--quick", action="store_true", help="few units, once, size a")
    option("--dtype", choices=["bfloat16", "float32"], default=dtype)
    option("--threads", type=int, default=usable_cores(), help="of each engine")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; `--quick` sets those that are not given."""
    found = parser.parse_args(arguments)
    found.sizes = found.sizes or (["a"] if found.quick else ["a", "b"])
    found.repetitions = found.repetitions or (1 if found.quick else 3)
    return found


@dataclass(frozen=True)
class Engine:
    """A loaded model. `run` empties the cache and runs a workload, measuring the load of the engine
    and of other programs. `scale`: the share of each workload that it runs."""

    name: str
    run: Callable[[Workload], tuple[Driven, ForeignLoad]]
    scale: dict[str, float] = field(default_factory=dict)

    def share(self, workload: str) -> float:
        return self.scale.get(workload, 1.0)

    def row(self, task: Task) -> Row:
        """Run a task. Raises PeerError."""
        workload = task.make(self.share(task.workload))
        return Row.of(self.name, task, workload.scale, *self.run(workload))


def here(name: str, do: Callable[[Workload], Driven]) -> Engine:
    """Return an engine that this process drives itself."""

    def run(workload: Workload) -> tuple[Driven, ForeignLoad]:
        load = ForeignLoad()
        return do(workload), load

    return Engine(name, run)


def ours(runtime: rl.Runtime) -> Iterator[Engine]:
    """Return our whole stack, driven in two ways."""

    def programs(workload: Workload) -> Driven:
        runtime.flush_cache()
        return drive_programs(runtime, workload)

    yield here(RAW, partial(drive, RawRequests(runtime.endpoint)))
    yield here(PROGRAMS, programs)


@contextmanager
def loaded(
    model: Path, arguments: argparse.Namespace, work: Path, about: dict[str, Any]
) -> Iterator[list[Engine]]:
    """Yield every engine with `model` loaded; `about` gets facts about each. A peer that does not
    start is recorded there and left out."""
    setting = known_peers.Setting(
        work, arguments.threads, arguments.dtype, KV_GIB, LIMIT, arguments.llama_server
    )
    engines = []
    with ExitStack() as stack:
        for name, python in arguments.peer_python.items():
            try:
                peer = stack.enter_context(known_peers.start(name, python, model, setting))
            except PeerError as error:
                about[name] = {"error": str(error)}
                continue
            engines.append(Engine(name, peer.run, known_peers.KNOWN_PEERS[name].scale))
            about[name] = peer.about
        for name, url in arguments.url.items():
            try:
                server = OpenAIServer(name, url)
            except PeerError as error:
                about[name] = {"error": str(error)}
                continue
            engines.append(here(name, partial(drive, server)))
            about[name] = {"cache_emptied": server.can_flush, "model": Path(server.model).name}
        options = {"dtype": arguments.dtype, "threads": arguments.threads}
        runtime = stack.enter_context(rl.Runtime(model, kv_memory_bytes=KV_GIB << 30, **options))
        yield [*engines, *ours(runtime)]


def take_turns(
    engines: list[Engine],
    tasks: Sequence[Task],
    about: dict[str, Any],
    progress: Callable[[str], None],
    least: float = 0.0,
) -> list[Row]:
    """Run every task on every engine that runs at least the share `least`. A failure is noted in
    `about` and excludes the engine from then on; slow workloads are not repeated."""
    rows: list[Row] = []
    slow = set()
    for task in tasks:
        shares = [(engine, engine.share(task.workload)) for engine in engines]
        order = [engine for engine, share in shares if share > 0 and share >= least]
        turn = task.repetition % len(order)
        # The order changes, so that no engine always follows the same one.
        for engine in [*order[turn:], *order[:turn]]:
            if (engine.name, task.workload) in slow:
                continue
            try:
                row = engine.row(task)
            except PeerError as error:
                about[engine.name] = {**about.get(engine.name, {}), "error": str(error)}
                engines.remove(engine)
                continue
            progress(f"{task.model} {task.workload} {engine.name}: {row.wall_s:.2f} s")
            rows.append(row)
            if row.wall_s > PATIENCE:
                slow.add((engine.name, task.workload))
    return rows


def measure_model(
    name: str,
    model: Path,
    arguments: argparse.Namespace,
    work: Path,
    progress: Callable[[str], None],
) -> tuple[list[Row], dict[str, Any]]:
    """Return all rows of a model, and facts about the engines."""
    about: dict[str, Any] = {}
    workloads, repetitions, scale = arguments.workloads, arguments.repetitions, arguments.scale
    with loaded(model, arguments, work, about) as engines:
        # A warm-up, for compilation and allocation at the first use.
        warm_up = tasks_of(name, model, workloads, -1, 1, min(scale, WARM_UP_SCALE))
        take_turns(engines, warm_up, about, lambda done: progress(f"{done} (warm-up)"), least=1.0)
        tasks = tasks_of(name, model, workloads, arguments.seed, repetitions, scale)
        return take_turns(engines, tasks, about, progress), about
