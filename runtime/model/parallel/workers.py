"""The processes of the ranks behind the first: started, watched and ended by rank 0."""

from __future__ import annotations

import selectors
import subprocess
from collections.abc import Sequence
from typing import Literal

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import ExecutorLost
from rootlace.wire.errors import ServerUnavailable, from_code

LOADING, LOADED = "loading", "loaded"
LOADING_SECONDS = 1.0
"""A worker that loads says so as often, from a thread of its own."""
SILENCE_SECONDS = 120.0
"""One that says nothing for so long has stopped: before it loads anything, it imports torch."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker reads from its standard input. Type and device of `executor` are not "auto",
    its threads are the worker's; `group`: the file by which ranks find each other; `cores`: the
    hardware threads that it is bound to, none: it is not; `log_format`: see `LogConfig`."""

    executor: ExecutorConfig
    cache: CacheConfig
    rank: int
    group: str
    cores: tuple[int, ...]
    log_format: Literal["text", "json"] = "text"


class Said(msgspec.Struct, frozen=True):
    """A worker's line on its standard output: that it loads its weights or has loaded them, or why
    not, as `Said(error's code, message)`."""

    what: str
    message: str = ""


class Workers:
    """They end with their parent, or with this object."""

    def __init__(self, configs: Sequence[WorkerConfig]) -> None:
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        for config in configs:
            process = subprocess.Popen(
                processes.child_command("rootlace.runtime.model.parallel.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what was read of it and not taken yet would be silent
                start_new_session=True,
                env=processes.compute_environment(),
            )
            self._ranks[config.rank] = process
            assert process.stdin is not None
            process.stdin.write(processes.write_config(config))
            process.stdin.flush()

    def wait_until_loaded(self) -> None:
        """Raises the typed error that a worker gave, or `ServerUnavailable` for one that ended
        without, or stopped."""
        for rank, process in self._ranks.items():
            said = Said(LOADING)
            while said.what == LOADING:
                said = _next_of(rank, process)
            if said.what != LOADED:
                raise from_code(said.what, said.message)

    def check(self) -> None:
        """Raises `ExecutorLost` where a worker has ended."""
        for rank, process in self._ranks.items():
            if process.poll() is not None:
                raise ExecutorLost(f"rank {rank} ended with code {process.returncode}")

    def pids(self) -> list[int]:
        """For tests and tools."""
        return [process.pid for process in self._ranks.values()]

    def close(self) -> None:
        """Have all of them end, and wait until they have."""
        for process in self._ranks.values():
            process.kill()
        for process in self._ranks.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _next_of(rank: int, process: subprocess.Popen[bytes]) -> Said:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(SILENCE_SECONDS):
            raise ServerUnavailable(
                f"rank {rank} said nothing for {SILENCE_SECONDS:g} s while it loaded the model"
            )
    line = process.stdout.readline()
    if not line:
        raise ServerUnavailable(f"rank {rank} ended with code {process.wait()}")
    return msgspec.json.decode(line, type=Said)
