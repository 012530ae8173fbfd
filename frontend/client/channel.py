"""The interface of connections for programs, and waiting for results.

`Connection` has a socket; local channels have none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rootlace.wire import protocol
from rootlace.wire.errors import RootlaceError

# Completion ---------------------------------------------------------------------------------------
#
# An event that happens once, and how threads and coroutines wait for it.


class Completion:
    """A one-shot event. Finished by the I/O thread; waited for by any thread or event loop.

    There is no lock: a callback is run by whoever pops it from the list, and popping is atomic, so
    it runs exactly once whether it was added before, after or while `finish` was called.
    """

    __slots__ = ("_callbacks", "done")

    def __init__(self) -> None:
        self.done = False
        self._callbacks: list[Callable[[], object]] = []

    def finish(self) -> None:
        self.done = True
        self._run_callbacks()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when it is over (now if it is), from whatever thread finishes it."""
        self._callbacks.append(callback)
        if self.done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()

    def wait(self) -> None:
        """Block until it is over; interruptible by Ctrl-C."""
        if not self.done:
            event = threading.Event()
            self.add_callback(event.set)
            wait_for_event(event)

    async def wait_async(self) -> None:
        if self.done:
            return
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        self.add_callback(lambda: call_in_loop(loop, resolve))
        await future


LOOK_UP_SECONDS = 0.5
"""How often the main thread looks for Ctrl-C. A signal that arrives just before a thread blocks
does not wake it, and would go unnoticed until the next event."""


def wait_for_event(event: threading.Event) -> None:
    """Block until `event` is set; interruptible by Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        event.wait()
        return
    while not event.wait(LOOK_UP_SECONDS):
        pass


class Signal:
    """Wakes its subscribers, any number of times (when a streaming program has news)."""

    __slots__ = ("_subscribers",)

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[], object], ...] = ()

    def subscribe(self, callback: Callable[[], object]) -> None:
        self._subscribers = (*self._subscribers, callback)

    def unsubscribe(self, callback: Callable[[], object]) -> None:
        self._subscribers = tuple(c for c in self._subscribers if c is not callback)

    def fire(self) -> None:
        for callback in self._subscribers:
            callback()


def call_in_loop(loop: Any, callback: Callable[[], object]) -> None:
    """Have `loop` call `callback`. In a loop that was closed meanwhile, nobody waits for it."""
    gathered = _gathering.calls
    if gathered is not None:
        gathered.setdefault(loop, []).append(callback)
        return
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise


class _Gathering(threading.local):
    """The calls that this thread is gathering, by loop; None while it is not."""

    calls: dict[Any, list[Callable[[], object]]] | None = None


_gathering = _Gathering()


def call_together(deliver: Callable[[], object]) -> None:
    """Run `deliver`. A loop is woken once for all that this has it call: waking is expensive."""
    calls: dict[Any, list[Callable[[], object]]] = {}
    _gathering.calls = calls
    try:
        deliver()
    finally:
        _gathering.calls = None
        for loop, callbacks in calls.items():
            call_in_loop(loop, partial(_call_all, callbacks))


def _call_all(callbacks: list[Callable[[], object]]) -> None:
    for callback in callbacks:
        callback()


# Channel ------------------------------------------------------------------------------------------


Sink = Callable[[protocol.Event], None]
"""Gets every event of one operation; the last one is terminal."""


@dataclass
class Counters:
    """Counts of one connection; `round_trips`: how often a program had to wait."""

    messages_sent: int = 0
    messages_received: int = 0
    ops_sent: int = 0
    round_trips: int = 0


class Channel(Protocol):
    """Takes operations and gives their events to the sinks that came with them."""

    counters: Counters

    @property
    def model(self) -> protocol.ModelInfo: ...

    @property
    def lost(self) -> RootlaceError | None:
        """Why the channel is of no use any more, or None."""

    def next_op(self) -> int: ...

    def next_branch(self) -> int: ...

    def next_program(self) -> str:
        """An id for one run of a program, unlike any of this or another channel."""

    def send(self, op: protocol.Op, sink: Sink) -> None:
        """Queue `op`; never blocks. Raises InvalidRequest for what cannot be sent."""

    def flush(self) -> None:
        """Send now what is queued."""

    def count_round_trip(self) -> None: ...

    def close(self) -> None: ...
