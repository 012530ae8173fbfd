"""Engines that have a model loaded and take turns at the workloads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import rootlace as rl
from benchmarks.peers import known_peers
from benchmarks.peers.drive import OnlineEngine
from benchmarks.peers.floors import Shape
from benchmarks.peers.measure import Row, Task, measure, row_of
from benchmarks.peers.peer_process import PeerError, PeerProcess
from benchmarks.peers.programs import drive_programs
from benchmarks.peers.raw_requests import RawRequests
from benchmarks.peers.report import PROGRAMS, RAW
from benchmarks.peers.url_peer import UrlPeer

KV_GIB = 4
"""Of the KV cache, ours and a peer's where it can be set."""
WARM_UP_SCALE = 0.25

Progressed = Callable[[str], None]


Runner = Callable[[Task], Row]
"""One engine with a loaded model: empties its cache and does the task."""


class Ours:
    """The whole stack of ours, driven in two ways."""

    def __init__(self, runtime: rl.Runtime) -> None:
        self._runtime = runtime
        self._raw = RawRequests(runtime.endpoint)

    def raw(self, task: Task) -> Row:
        return run_online(self._raw, RAW, task)

    def programs(self, task: Task) -> Row:
        self._runtime.flush_cache()
        workload = task.make()
        run, cached = drive_programs(self._runtime, workload)
        return row_of(run, PROGRAMS, task, workload.scale, cached)


def run_online(engine: OnlineEngine, name: str, task: Task) -> Row:
    """An engine that this process drives itself."""
    engine.reset()
    workload = task.make()
    run = measure(engine, workload)
    fixed = not engine.replies_are_ids
    return row_of(run, name, task, workload.scale, engine.cached(), fixed)


def run_peer(peer: PeerProcess, scales: dict[str, float], task: Task) -> Row:
    """Raises PeerError."""
    workload = task.make(scales.get(task.workload, 1.0))
    run, cached = peer.run(workload, task.vocab_size)
    return row_of(run, peer.name, task, workload.scale, cached)


@dataclass
class Engines:
    """What takes turns, what is to be told about it, and who does which part of which workload."""

    runners: dict[str, Runner] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, dict[str, float]] = field(default_factory=dict)

    def does(self, engine: str, workload: str) -> bool:
        return self.scale(engine, workload) > 0

    def scale(self, engine: str, workload: str) -> float:
        return self.scales.get(engine, {}).get(workload, 1.0)


@contextmanager
def engines(model: Path, arguments: argparse.Namespace, work: Path) -> Iterator[Engines]:
    """Every engine with `model` loaded. A peer that does not start is recorded and left out."""
    setting = known_peers.Setting(
        work=work,
        drivers=arguments.drivers,
        threads=arguments.threads,
        dtype=arguments.dtype,
        kv_gib=KV_GIB,
        limit=arguments.limit,
        llama_server=arguments.llama_server,
        arguments=arguments.peer_arguments,
    )
    found = Engines()
    with ExitStack() as stack:
        for name, python in arguments.peer_python.items():
            try:
                peer = stack.enter_context(known_peers.start(name, python, model, setting))
            except PeerError as error:
                found.about[name] = {"error": str(error)}
                continue
            scales = arguments.peer_scale.get(name, known_peers.KNOWN_PEERS[name].scale)
            found.scales[name] = scales
            found.runners[name] = partial(run_peer, peer, scales)
            found.about[name] = peer.about
        for name, url in arguments.url.items():
            try:
                server = UrlPeer(name, url, arguments.url_api_key)
            except PeerError as error:
                found.about[name] = {"error": str(error)}
                continue
            found.runners[name] = partial(run_online, server, name)
            found.about[name] = {
                "cache_emptied": server.can_flush,
                "model": Path(server.model).name,
            }
        options = {"dtype": arguments.dtype, "threads": arguments.threads}
        options |= {"kv_memory_bytes": KV_GIB << 30, **arguments.runtime}
        ours = Ours(stack.enter_context(rl.Runtime(model, **options)))
        found.runners[RAW] = ours.raw
        found.runners[PROGRAMS] = ours.programs
        yield found


def measure_model(
    name: str, model: Path, arguments: argparse.Namespace, work: Path, progress: Progressed
) -> tuple[list[Row], dict[str, Any]]:
    """All rows of a model, and what is known of the engines. Who fails is left out from then on."""
    rows: list[Row] = []
    shape = Shape.read(model, arguments.dtype)
    with engines(model, arguments, work) as found:
        runners, about = found.runners, found.about

        def take_turn(engine: str, task: Task) -> Row | None:
            progress(f"{name} {task.workload} {engine}")
            try:
                row = runners[engine](task)
            except PeerError as error:
                about[engine] = {**about.get(engine, {}), "error": str(error)}
                del runners[engine]
                return None
            progress(f"{name} {task.workload} {engine}: {row.wall_s:.2f} s")
            return row

        for workload in arguments.workloads:
            # Once for nothing: whatever is compiled or allocated at the first time.
            warm_up = Task(name, workload, -1, -1, min(arguments.scale, WARM_UP_SCALE), shape.vocab)
            for engine in list(runners):
                if found.scale(engine, workload) == 1.0:
                    take_turn(engine, warm_up)
        slow = set()
        for workload in arguments.workloads:
            for repetition in range(arguments.repetitions):
                seed = arguments.seed + repetition
                task = Task(name, workload, seed, repetition, arguments.scale, shape.vocab)
                order = [engine for engine in runners if found.does(engine, workload)]
                turn = repetition % len(order)
                # Nobody always follows the same one.
                for engine in [*order[turn:], *order[:turn]]:
                    if (engine, workload) in slow:
                        continue
                    row = take_turn(engine, task)
                    if row is not None:
                        rows.append(row)
                        if row.wall_s > arguments.patience:
                            slow.add((engine, workload))
    return rows, about
