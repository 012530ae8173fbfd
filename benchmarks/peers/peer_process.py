"""A peer in a process with its own interpreter: started once, then given one workload at a time."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ForeignLoad
from benchmarks.peers.drive import Driven, PeerError
from benchmarks.peers.family import Family, end
from benchmarks.peers.workloads import Workload

_TAIL_LINES = 15
ORDER = ("name", "seed", "scale", "vocab_size")
"""What makes a workload (see `drivers/serve.py`)."""


class PeerProcess:
    """A driver's loaded engine. `log` gets its output.

    Between runs the process and its children are stopped (SIGSTOP): an engine that spins while it
    waits would take cores from the measured one. Raises PeerError.
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
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs, log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), str(driver), *arguments],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                # A group in our session: if we die while it is stopped, the system wakes it with
                # a SIGHUP, which ends it (in a session of its own it would stay stopped for ever).
                process_group=0,
            )
        self._family = Family(self._process.pid)
        try:
            ready = self._answer()
        except BaseException:
            self.stop()
            raise
        self.about = {"engine": ready.pop("ready"), **ready}
        self.pause()

    def run(self, workload: Workload) -> tuple[Driven, ForeignLoad]:
        """Return the driver's observations, and the load measured meanwhile."""
        answer, load = self.ask({key: getattr(workload, key) for key in ORDER})
        return Driven(**answer["driven"]), load

    def ask(self, order: Mapping[str, Any]) -> tuple[dict[str, Any], ForeignLoad]:
        """Return the answer to an order, and the load measured meanwhile."""
        self.resume()
        load = ForeignLoad(self._process.pid)
        try:
            with contextlib.suppress(OSError):  # the next read finds out that it has ended
                self._pipe.send_bytes(json.dumps(order).encode())
            return self._answer(), load
        finally:
            self.pause()

    def _answer(self) -> dict[str, Any]:
        try:
            if not self._pipe.poll(self.limit):
                raise PeerError(f"{self.name} said nothing for {self.limit:g} s{self._tail()}")
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            status = self._process.wait(timeout=10)
            raise PeerError(f"{self.name} ended with status {status}{self._tail()}") from None
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    # ------------------------------------------------------------ suspending

    def pause(self) -> None:
        self._family.pause()

    def resume(self) -> None:
        self._family.resume()

    def stop(self, grace: float = 5.0) -> None:
        """End the process and all its descendants."""
        self.resume()
        family = list(self._family)
        self._pipe.close()
        end(family, grace)
        self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
