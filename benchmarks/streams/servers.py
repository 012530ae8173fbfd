"""The servers whose streams are measured, each with the CPU time of its processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import rootlace as rl
from benchmarks.host_overhead.stack import started

START_SECONDS = 600


@dataclass(frozen=True)
class Cpu:
    """CPU seconds: of the process that answers HTTP (`system`: of these, what the system took for
    it), and of the engine's processes."""

    front: float
    system: float
    engine: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.front - other.front, self.system - other.system, self.engine - other.engine)


@dataclass(frozen=True)
class Server:
    """A server that runs: `pid` answers HTTP, its children are the engine."""

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
    """Ours, with an engine whose steps take so long and compute nothing; of `model` only the
    tokenizer is used."""
    with started(model, step_seconds) as stack:
        yield Server(stack.url, "", stack.gateway)


@contextmanager
def with_model(model: Path, rows: int) -> Iterator[Server]:
    """Ours, as it is used."""
    with rl.Runtime(model, http_port=0, max_running=rows) as runtime:
        assert runtime.url is not None
        yield Server(runtime.url, "", runtime.pid)


@contextmanager
def vllm(python: Path, model: Path, rows: int, log: Path) -> Iterator[Server]:
    """vLLM's server (`python`: the interpreter of its environment) on the same model.

    Raises RuntimeError where it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"),
        *("--max-num-seqs", str(rows), "--disable-uvicorn-access-log"),
    ]
    cores = os.cpu_count() or 1
    environment = {
        # Left alone, vLLM on a CPU binds one core of two; its OpenMP runtime wants preloading.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    library = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if library.exists():
        environment["LD_PRELOAD"] = str(library)
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        _wait_until_ready(process, url, log)
        yield Server(url, str(model), process.pid)
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for one in alive:
            one.kill()
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"{url}/health", timeout=5):
                return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.2)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"vLLM's server did not start:\n{end}")
