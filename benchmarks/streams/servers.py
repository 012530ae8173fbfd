"""The servers whose streams are measured, each with the CPU time of its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import rootlace as rl
from benchmarks.host_overhead.stack import started
from benchmarks.peers.vllm_server import vllm_server
from rootlace.kernels.native.machine import usable_cores


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of the HTTP process (`system`: of these, in the system), and of the engine's
    processes."""

    front: float
    system: float
    engine: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.front - other.front, self.system - other.system, self.engine - other.engine)


@dataclass(frozen=True)
class Server:
    """A running server: `pid` answers HTTP, its children are the engine."""

    url: str
    model: str
    pid: int

    def cpu(self) -> Cpu:
        front = psutil.Process(self.pid)
        times = front.cpu_times()
        engine = 0.0
        for child in front.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = child.cpu_times()
                engine += spent.user + spent.system
        return Cpu(times.user + times.system, times.system, engine)


@contextmanager
def without_model(model: Path, step_seconds: float) -> Iterator[Server]:
    """Start our server with an engine whose steps take so long and compute nothing; `model` gives
    only the tokenizer."""
    with started(model, step_seconds) as stack:
        yield Server(stack.url, "", stack.gateway)


@contextmanager
def with_model(model: Path, rows: int) -> Iterator[Server]:
    """Start our server as in use."""
    with rl.Runtime(model, http_port=0, max_running=rows) as runtime:
        assert runtime.url is not None
        yield Server(runtime.url, "", runtime.pid)


@contextmanager
def vllm(python: Path, model: Path, rows: int, log: Path) -> Iterator[Server]:
    """Start vLLM's server (`python`: interpreter of its environment) on the same model.

    Raises RuntimeError if it does not start.
    """
    options = ("--max-model-len", "4096", "--max-num-seqs", str(rows))
    with vllm_server(python, model, log, usable_cores(), 1, options) as (url, pid):
        yield Server(url, str(model), pid)
