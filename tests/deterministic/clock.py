"""Event loop with virtual time, which stands still while code runs, and jumps to the next timer
when none does."""

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
    """Raised when the main task is not done and no callback or timer is left."""


class _Waiting:
    """Stands for a selector: waiting advances the time."""

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
    """The operating system of a simulated world: clock, descriptors, threads and processes. Calls
    for a thread run at once, and their results come a little later.

    `start_process` makes the transport for `asyncio.create_subprocess_exec`.
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
        """Do nothing: there are no other threads that could wake the loop."""

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
    """Replace, within the block, the product's clocks by the loop's, its sockets by those of
    `context`, its state's disk by `disk`, and its random numbers by seeded ones. Nothing is patched
    elsewhere."""
    dice, thread = random.Random(f"product {seed}"), threading.get_ident()

    def clock() -> float:
        """Each look at the clock advances it; now and then other threads had their turn in between.
        The world has one thread, so those were there before."""
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
        # No other thread compiles, so the engine need not wait for one.
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
