"""A peer in a process of its own interpreter: started once, asked for one workload at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.common import ForeignLoad
from benchmarks.peers.drive import Driven, PeerError
from benchmarks.peers.workloads import Workload

_TAIL_LINES = 15
ORDER = ("name", "seed", "scale", "vocab_size")
"""What makes a workload (see `drivers/serve.py`)."""


class PeerProcess:
    """Its driver's engine, loaded. `log` gets what it prints.

    Between runs the process and its children are stopped (SIGSTOP): an engine that spins while it
    waits would take cores from the one that is measured. Raises PeerError.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        driver: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        limit: float,
    ) -> None:
        self.name = name
        self.limit = limit
        self._log = log
        self._paused: list[psutil.Process] = []
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), str(driver), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **environment},
                # A group in our session: if we die while it is stopped, the system wakes it with
                # a SIGHUP, which ends it (in a session of its own it would stay stopped for ever).
                process_group=0,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders: IO[str] = self._process.stdin
        self._answers = _lines(self._process.stdout)
        try:
            ready = self._answer(limit)
        except BaseException:
            self.stop()
            raise
        self.about = {"engine": ready.pop("ready"), **ready}
        self.pause()

    def run(self, workload: Workload) -> tuple[Driven, float]:
        """What was seen, and how many cores other programs kept busy meanwhile."""
        self.resume()
        load = ForeignLoad(self._process.pid)
        try:
            order = {key: getattr(workload, key) for key in ORDER}
            try:
                self._orders.write(json.dumps(order) + "\n")
                self._orders.flush()
            except BrokenPipeError:
                raise PeerError(f"{self.name} has ended{self._tail()}") from None
            return Driven(**self._answer(self.limit)["driven"]), load.cores()
        finally:
            self.pause()

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            raise PeerError(f"{self.name} said nothing for {limit:g} s{self._tail()}") from None
        if not line:
            status = self._process.wait(timeout=10)
            raise PeerError(f"{self.name} ended with status {status}{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = deque(self._log.read_text(errors="replace").splitlines(), maxlen=_TAIL_LINES)
        return "".join(f"\n  | {line}" for line in lines)

    # ------------------------------------------------------------ holding still

    def pause(self) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                process.suspend()
                self._paused.append(process)

    def resume(self) -> None:
        for process in self._paused:
            with contextlib.suppress(psutil.Error):
                process.resume()
        self._paused = []

    def _family(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            head = psutil.Process(self._process.pid)
            yield head
            yield from head.children(recursive=True)

    def stop(self, grace: float = 5.0) -> None:
        """End it and whatever it started."""
        self.resume()
        family = list(self._family())
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        _, alive = psutil.wait_procs(family, timeout=grace)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _lines(pipe: IO[str]) -> queue.SimpleQueue[str]:
    """Gets the lines of a pipe as they come, and "" at its end."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with pipe:
            for line in pipe:
                found.put(line)
        found.put("")

    threading.Thread(target=read, daemon=True).start()
    return found
