"""Event loop with virtual time: time stands still while something runs, and jumps to the next timer
when nothing is left to do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from rootlace.runtime.server import score, session_store
from rootlace.runtime.server.session_store import SessionStore
from tests.deterministic.state import Disk, DiskThread

START = 1000.0
"""Virtual seconds at the start."""
LOOK, DESCHEDULED = 1e-6, 0.01
"""Seconds that pass where the product looks at the clock."""


class Stuck(AssertionError):
    """Nothing is left to do, and the main task is not done."""


class _Waiting:
    """Stands in for a selector: to wait is to let the time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is left to do, and nothing will happen any more")
        if timeout > 0:
            self._loop.now += timeout
        return []

    def close(self) -> None:
        return


class VirtualLoop(asyncio.BaseEventLoop):
    """The operating system of a simulated world: its clock, its descriptors, its threads and its
    processes. Calls for a thread are made at once, and their results come a little later.

    `start_process` makes a transport of what `asyncio.create_subprocess_exec` asks for.
    """

    def __init__(self, start_process: Callable[..., asyncio.SubprocessTransport]) -> None:
        super().__init__()
        self.now = START
        self._clock_resolution = 1e-9
        self._selector = _Waiting(self)
        self._start_process = start_process
        self._readers: dict[int, Callable[[], object]] = {}
        self.complaints: list[str] = []
        """Errors that asyncio would log: exceptions that no task took, callbacks that raised."""
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self.now

    def _process_events(self, events: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        """There are no other threads to be woken by."""

    def _complain(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ------------------------------------------------------------ descriptors, threads, processes

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: int) -> bool:  # type: ignore[override]
        return self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        """Tell readers of a descriptor about a change."""

        def tell() -> None:
            if fd in self._readers:
                self._readers[fd]()

        self.call_soon(tell)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        try:
            self.call_later(1e-3, settle, func(*args), None)
        except Exception as error:
            self.call_later(1e-3, settle, None, error)
        return future

    async def subprocess_exec(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *args: str, **kwargs: Any
    ) -> tuple[Any, Any]:
        protocol = protocol_factory()
        return self._start_process(protocol, args), protocol


@contextlib.contextmanager
def virtual(loop: VirtualLoop, context: type, disk: Disk, seed: int) -> Iterator[None]:
    """Within the block the product's clocks are the loop's, its sockets are those of `context`, its
    state is written to `disk`, and its dice are seeded. This is the one place where anything is
    patched."""
    dice, thread = random.Random(f"product {seed}"), threading.get_ident()

    def clock() -> float:
        """Who looks at the clock finds that it goes on, and now and then that others had their
        turn in between. The world has one thread: others were there before it."""
        if threading.get_ident() != thread:
            return loop.now
        loop.now += DESCHEDULED if dice.random() < 0.002 else LOOK
        return loop.now

    with contextlib.ExitStack() as stack:
        for name in ("monotonic", "perf_counter", "thread_time"):
            stack.enter_context(patch.object(time, name, clock))
        stack.enter_context(patch("zmq.Context", context))
        stack.enter_context(patch.object(secrets, "randbits", lambda _: SEED_OF_THE_GATEWAY))
        stack.enter_context(patch.object(secrets, "token_hex", lambda n: dice.randbytes(n).hex()))
        stack.enter_context(
            patch.object(uuid, "uuid4", lambda: uuid.UUID(int=dice.getrandbits(128), version=4))
        )
        stack.enter_context(patch.object(score, "_random", dice))
        writer = functools.partial(DiskThread, loop, dice)
        stack.enter_context(
            patch.object(session_store, "ThreadPoolExecutor", lambda *_, **__: writer())
        )
        commit = functools.partialmethod(_commit, disk, SessionStore._commit)
        stack.enter_context(patch.object(SessionStore, "_commit", commit))
        # Nobody is compiling on another thread: there is nothing to wait for.
        stack.enter_context(patch("rootlace.runtime.engine.core.COMPILING_SECONDS", 0))
        yield


def _commit(
    store: SessionStore,
    disk: Disk,
    commit: Callable[[SessionStore, sqlite3.Connection], None],
    file: sqlite3.Connection,
) -> None:
    disk.commit(commit, store, file)


SEED_OF_THE_GATEWAY = 123456789
"""Seed that the gateway draws for a request without a seed, so that its tokens are known."""
