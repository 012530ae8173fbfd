"""Engines that have a model loaded and take turns at the workloads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import rootlace as rl
from benchmarks.common import ForeignLoad
from benchmarks.peers import known_peers
from benchmarks.peers.completion_server import OpenAIServer
from benchmarks.peers.drive import OnlineEngine, PeerError, drive
from benchmarks.peers.measure import Row, Task
from benchmarks.peers.peer_process import PeerProcess
from benchmarks.peers.programs import drive_programs
from benchmarks.peers.raw_requests import RawRequests
from benchmarks.peers.report import PROGRAMS, RAW

KV_GIB = 4
"""Of the KV cache, ours and a peer's where it can be set."""
WARM_UP_SCALE = 0.25
LIMIT = 300.0
"""Seconds that a peer may take to load, and for a workload."""
PATIENCE = 60.0
"""What took more seconds is not repeated."""

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
        workload, load = task.make(), ForeignLoad()
        driven = drive_programs(self._runtime, workload)
        return Row.of(driven, load.cores(), PROGRAMS, task, workload.scale)


def run_online(engine: OnlineEngine, name: str, task: Task) -> Row:
    """An engine that this process drives itself."""
    workload, load = task.make(), ForeignLoad()
    driven = drive(engine, workload)
    fixed = not engine.replies_are_ids
    return Row.of(driven, load.cores(), name, task, workload.scale, fixed)


def run_peer(peer: PeerProcess, scales: dict[str, float], task: Task) -> Row:
    """Raises PeerError."""
    workload = task.make(scales.get(task.workload, 1.0))
    return Row.of(*peer.run(workload, task.vocab_size), peer.name, task, workload.scale)


@dataclass
class Engines:
    """What takes turns, what is to be told about it, and who does which part of which workload."""

    runners: dict[str, Runner] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, dict[str, float]] = field(default_factory=dict)

    def scale(self, engine: str, workload: str) -> float:
        return self.scales.get(engine, {}).get(workload, 1.0)

    def take_turn(self, engine: str, task: Task) -> Row | None:
        """Who fails is left out from then on."""
        try:
            return self.runners[engine](task)
        except PeerError as error:
            self.about[engine] = {**self.about.get(engine, {}), "error": str(error)}
            del self.runners[engine]
            return None


@contextmanager
def engines(model: Path, arguments: argparse.Namespace, work: Path) -> Iterator[Engines]:
    """Every engine with `model` loaded. A peer that does not start is recorded and left out."""
    setting = known_peers.Setting(
        work, arguments.threads, arguments.dtype, KV_GIB, LIMIT, arguments.llama_server
    )
    found = Engines()
    with ExitStack() as stack:
        for name, python in arguments.peer_python.items():
            try:
                peer = stack.enter_context(known_peers.start(name, python, model, setting))
            except PeerError as error:
                found.about[name] = {"error": str(error)}
                continue
            scales = found.scales[name] = known_peers.KNOWN_PEERS[name].scale
            found.runners[name] = partial(run_peer, peer, scales)
            found.about[name] = peer.about
        for name, url in arguments.url.items():
            try:
                server = OpenAIServer(name, url)
            except PeerError as error:
                found.about[name] = {"error": str(error)}
                continue
            found.runners[name] = partial(run_online, server, name)
            served = Path(server.model).name
            found.about[name] = {"cache_emptied": server.can_flush, "model": served}
        options = {"dtype": arguments.dtype, "threads": arguments.threads}
        ours = Ours(stack.enter_context(rl.Runtime(model, kv_memory_bytes=KV_GIB << 30, **options)))
        found.runners |= {RAW: ours.raw, PROGRAMS: ours.programs}
        yield found


def measure_model(
    name: str,
    model: Path,
    arguments: argparse.Namespace,
    work: Path,
    progress: Callable[[str], None],
) -> tuple[list[Row], dict[str, Any]]:
    """All rows of a model, and what is known of the engines."""
    rows: list[Row] = []
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    with engines(model, arguments, work) as found:
        for workload in arguments.workloads:
            # Once for nothing: whatever is compiled or allocated at the first time.
            warm_up = Task(name, workload, -1, -1, min(arguments.scale, WARM_UP_SCALE), vocab)
            for engine in list(found.runners):
                if found.scale(engine, workload) == 1.0:
                    progress(f"{name} {workload} {engine}: warm-up")
                    found.take_turn(engine, warm_up)
        for workload in arguments.workloads:
            slow = set()
            for repetition in range(arguments.repetitions):
                seed = arguments.seed + repetition
                task = Task(name, workload, seed, repetition, arguments.scale, vocab)
                order = [engine for engine in found.runners if found.scale(engine, workload) > 0]
                turn = repetition % len(order)
                # Nobody always follows the same one.
                for engine in [*order[turn:], *order[:turn]]:
                    if engine in slow:
                        continue
                    row = found.take_turn(engine, task)
                    if row is not None:
                        progress(f"{name} {workload} {engine}: {row.wall_s:.2f} s")
                        rows.append(row)
                        if row.wall_s > PATIENCE:
                            slow.add(engine)
        return rows, found.about
