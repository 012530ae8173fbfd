"""The servers whose streams are measured, each with the CPU time of its processes."""

from __future__ import annotations

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
    """CPU seconds: of the process that answers HTTP, and of the engine's processes."""

    front: float
    engine: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.front - other.front, self.engine - other.engine)


@dataclass(frozen=True)
class Server:
    """A running server: `pid` answers HTTP, its children are the engine."""

    url: str
    model: str
    pid: int

    def cpu(self) -> Cpu:
        children = psutil.Process(self.pid).children(recursive=True)
        return Cpu(_seconds(self.pid), sum(_seconds(child.pid) for child in children))


def _seconds(pid: int) -> float:
    """CPU seconds of a process's threads, 0.0 of one that ended. Linux counts nanoseconds; the
    times of psutil are samples of 10 ms, and steps by a timer may dodge or hit each of them."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        if any(tasks.glob("*/schedstat")):
            files = tasks.glob("*/schedstat")
            return sum(int(file.read_text().split()[0]) for file in files) / 1e9
        spent = psutil.Process(pid).cpu_times()
        return spent.user + spent.system
    except (psutil.NoSuchProcess, OSError):
        return 0.0


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
