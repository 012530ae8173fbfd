"""Channels: the interface of connections, waiting for results, and channels without a socket.

`Connection` has a socket; local channels have none. For a service that is no Rootlace server, a
`Machine` runs a client's operations in their order (docs/internals.md).

Sections: completion, channel, machine, local channel.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from rootlace.wire import protocol
from rootlace.wire.errors import InternalError, InvalidRequest, RootlaceError

# Completion ---------------------------------------------------------------------------------------
#
# An event that happens once, for threads and coroutines to wait for.


class Completion:
    """One-shot event, finished by the I/O thread; any thread or event loop may wait for it.

    There is no lock. The thread that pops a callback from the list runs it, and popping is atomic.
    So a callback runs exactly once, whether added before, after or during `finish`.
    """

    __slots__ = ("_callbacks", "done")

    def __init__(self) -> None:
        self.done = False
        self._callbacks: list[Callable[[], object]] = []

    def finish(self) -> None:
        self.done = True
        self._run_callbacks()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once finished (now if so already), in the thread that finishes."""
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
        """Block until finished; interruptible by Ctrl-C."""
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
"""Time between the main thread's looks for Ctrl-C. A signal just before a thread blocks does not
wake the thread, and would go unnoticed until the next event."""


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
        # Threads cannot lose each other's changes of a dictionary.
        self._subscribers: dict[Callable[[], object], None] = {}

    @property
    def heard(self) -> bool:
        """Return whether there are subscribers."""
        return bool(self._subscribers)

    def subscribe(self, callback: Callable[[], object]) -> None:
        self._subscribers[callback] = None

    def unsubscribe(self, callback: Callable[[], object]) -> None:
        self._subscribers.pop(callback, None)

    def fire(self) -> None:
        for callback in list(self._subscribers):
            callback()


def call_in_loop(loop: Any, callback: Callable[[], object]) -> None:
    """Let `loop` call `callback`. Nobody waits in a loop that was closed meanwhile."""
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
    """Calls that this thread is gathering, by loop; None while it gathers none."""

    calls: dict[Any, list[Callable[[], object]]] | None = None


_gathering = _Gathering()


def call_together(deliver: Callable[[], object]) -> None:
    """Run `deliver`, and wake each loop once for all of its calls: waking is expensive."""
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


MAX_FRAME_BYTES = 32 * 2**20
"""Half of a server's default bound on a frame."""

Sink = Callable[[protocol.Event], None]
"""Receiver of every event of one operation, the terminal event last."""


@dataclass
class Counters:
    """Counts of one connection; `round_trips` counts the waits of programs."""

    messages_sent: int = 0
    round_trips: int = 0


class Channel(Protocol):
    """Connection for programs: takes operations and gives their events to the sinks."""

    counters: Counters

    @property
    def model(self) -> protocol.ModelInfo: ...

    @property
    def lost(self) -> RootlaceError | None:
        """Reason why the channel is lost, or None."""

    def next_op(self) -> int: ...

    def next_branch(self) -> int: ...

    def next_program(self) -> str:
        """Return an id for one run of a program, unique over all channels."""

    def send(self, op: protocol.Op, sink: Sink) -> None:
        """Queue `op`; never blocks. Raises InvalidRequest for an operation that cannot be sent."""

    def flush(self) -> None:
        """Send the queued operations now."""

    def count_round_trip(self) -> None: ...

    def close(self) -> None: ...


def pack(op: protocol.Op) -> msgspec.Raw:
    """Pack `op` for a frame. Raises InvalidRequest for an operation that no frame can carry."""
    try:
        packed = protocol.pack(op)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise InvalidRequest(f"it cannot be sent: {error}") from None
    size = len(memoryview(packed))
    if size > MAX_FRAME_BYTES:
        raise InvalidRequest(f"an operation of {size} bytes; at most {MAX_FRAME_BYTES} travel")
    return packed


# Machine ------------------------------------------------------------------------------------------
#
# A client's branches without a model: `answer` gives the events of `Generate` and `Select`, and the
# machine does the other operations.


class BranchText:
    """Branch: its contents as `text` and as `parts`, and its queue."""

    def __init__(self, parent: BranchText | None) -> None:
        self.parent = parent
        self.text = ""
        self.parts: list[protocol.Part] = []
        self.broken = ""
        self.received = 0
        self.finished = 0
        self.queue: deque[protocol.Op] = deque()
        self.started = parent is None
        self._start = 0

    def add(self, part: protocol.Text | protocol.Tokens | protocol.Image, text: str) -> None:
        self.parts.append(part)
        self.text += text

    @property
    def gained(self) -> str:
        return self.text[self._start :]

    def start(self) -> None:
        """Copy the contents of the parent, which has reached this branch's `Open`."""
        assert self.parent is not None
        self.text, self.parts = self.parent.text, list(self.parent.parts)
        self._start, self.started = len(self.text), True


Ask = protocol.Generate | protocol.Select
Answer = Callable[[BranchText, Ask], "list[protocol.Event] | None"]
"""Returns the events of an operation, the terminal one last; None: not yet. An exception fails the
operation. The machine adds generated text to the branch."""


class Machine:
    """Branches of one client. `emit` gets every event; `spell` gives the text of a token id."""

    def __init__(
        self,
        answer: Answer,
        emit: Callable[[protocol.Event], None],
        spell: Callable[[int], str] = "[{}]".format,
    ) -> None:
        self.branches: dict[int, BranchText] = {}
        self._answer = answer
        self._emit = emit
        self._spell = spell
        self._quotes: dict[int, list[tuple[BranchText, int]]] = {}

    def take(self, op: Any) -> None:
        """Queue an operation of a branch; `advance` runs queued operations."""
        try:
            self._take(op)
        except InvalidRequest as error:
            self._emit(protocol.Failed.of(op.op, error))

    def _take(self, op: Any) -> None:
        if isinstance(op, protocol.Open):
            parent = None if op.parent is None else self._branch(op.parent)
            self.branches[op.branch] = branch = BranchText(parent)
            self._enqueue(parent or branch, op)
            return
        branch = self._branch(op.branch)
        if isinstance(op, protocol.Cancel):
            branch.broken = branch.broken or "cancelled by the client"
            branch.started = True
            self._emit(protocol.Done(op.op))
            return
        if isinstance(op, protocol.Append):
            quoted = [part.branch for part in op.parts if isinstance(part, protocol.Quote)]
            sources = [self._branch(number) for number in quoted]
            self._quotes[op.op] = [(source, source.received) for source in sources]
        self._enqueue(branch, op)

    def _branch(self, number: int) -> BranchText:
        if number not in self.branches:
            raise InvalidRequest(f"unknown branch {number}")
        return self.branches[number]

    def _enqueue(self, branch: BranchText, op: protocol.Op) -> None:
        branch.queue.append(op)
        branch.received += 1

    def advance(self) -> None:
        """Run every operation that can run."""
        moved = True
        while moved:
            moved = False
            for number, branch in list(self.branches.items()):
                while branch.started and branch.queue and self._run(number, branch):
                    branch.queue.popleft()
                    branch.finished += 1
                    moved = True

    def _run(self, number: int, branch: BranchText) -> bool:
        """Run the next operation of the branch; return False if it cannot run yet."""
        op = branch.queue[0]
        if isinstance(op, protocol.Close):
            self.branches.pop(number, None)
            self._emit(protocol.Done(op.op))
            return True
        if branch.broken:
            if isinstance(op, protocol.Open) and op.branch in self.branches:
                child = self.branches[op.branch]
                child.started, child.broken = True, branch.broken
            self._emit(protocol.Failed(op.op, "cancelled", branch.broken))
            return True
        try:
            events = self._perform(branch, op)
        except Exception as reason:
            error = reason
            if not isinstance(error, RootlaceError):
                error = InternalError(f"{type(reason).__name__}: {reason}")
            branch.broken = str(error)
            events = [protocol.Failed.of(op.op, error)]
        for event in events or ():
            self._emit(event)
        return events is not None

    def _perform(self, branch: BranchText, op: protocol.Op) -> list[protocol.Event] | None:
        if isinstance(op, protocol.Open):
            child = self.branches.get(op.branch)
            if child is not None and child.parent is not None:
                child.start()
            return [protocol.Done(op.op)]
        if isinstance(op, protocol.Append):
            return self._append(branch, op)
        if isinstance(op, protocol.Prefill):
            return [protocol.Done(op.op, usage=protocol.Usage(prompt_tokens=len(branch.text)))]
        if not isinstance(op, protocol.Generate | protocol.Select):
            raise InvalidRequest(f"there is no {type(op).__name__} here")
        events = self._answer(branch, op)
        if events is None:
            return None
        last = events[-1]
        if isinstance(last, protocol.Generated):
            self._add(branch, protocol.Text(last.outputs[0].text))
        elif isinstance(last, protocol.Selected):
            self._add(branch, protocol.Text(last.choice))
        return events

    def _append(self, branch: BranchText, op: protocol.Append) -> list[protocol.Event] | None:
        if any(source.finished < count for source, count in self._quotes[op.op]):
            return None
        quoted = iter(self._quotes.pop(op.op))
        for part in op.parts:
            if isinstance(part, protocol.Quote):
                source = next(quoted)[0]
                if source.broken:
                    raise InvalidRequest(f"the quoted branch is broken: {source.broken}")
                part = protocol.Text(source.gained)
            self._add(branch, part)
        return [protocol.Done(op.op)]

    def _add(
        self, branch: BranchText, part: protocol.Text | protocol.Tokens | protocol.Image
    ) -> None:
        if isinstance(part, protocol.Text):
            branch.add(part, part.text)
        elif isinstance(part, protocol.Image):
            digest = hashlib.sha256(part.data or part.url.encode()).hexdigest()
            branch.add(part, f"[image {digest[:12]}]")
        else:
            branch.add(part, "".join(map(self._spell, part.ids)))


# Local channel ------------------------------------------------------------------------------------
#
# A connection without a socket: the sending thread runs the operations.


class LocalChannel:
    """Channel that runs operations with a `Machine` in the sending thread, one operation at a time
    over all threads. Events come before `send` returns, or in the thread already running
    operations.

    `check` raises InvalidRequest for an operation to be refused at the line that sends it.
    """

    def __init__(
        self,
        model: protocol.ModelInfo,
        answer: Answer,
        spell: Callable[[int], str] = "[{}]".format,
        check: Callable[[protocol.Op], None] = lambda op: None,
    ) -> None:
        self.counters = Counters()
        self.lost: RootlaceError | None = None
        self.model = model
        self._ids = itertools.count(1)
        self._session = uuid.uuid4().hex
        self._sinks: dict[int, Sink] = {}
        self._check = check
        self._machine = Machine(answer, self._emit, spell)
        self._inbox: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()

    @property
    def open_branches(self) -> int:
        return len(self._machine.branches)

    def next_op(self) -> int:
        return next(self._ids)

    next_branch = next_op

    def next_program(self) -> str:
        return f"{self._session}-{next(self._ids)}"

    def send(self, op: protocol.Op, sink: Sink) -> None:
        self._check(op)
        pack(op)  # an operation that no frame can carry is refused here, too
        self._sinks[op.op] = sink
        self.call(lambda: self._do(op))

    def call(self, what: Callable[[], object]) -> None:
        """Run `what` alone: now, or in the thread already running operations."""
        self._inbox.append(what)
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                while self._inbox:
                    self._inbox.popleft()()
            finally:
                self._lock.release()

    def wake(self) -> None:
        """Ask `answer` again, which may have its events now. From any thread."""
        self.call(self._machine.advance)

    def tell(self, event: protocol.Event) -> None:
        """Give an event to its sink before the operation's answer. From any thread."""
        self.call(lambda: self._emit(event))

    def _do(self, op: protocol.Op) -> None:
        if isinstance(op, protocol.FlushCache | protocol.Ping):
            self._emit(protocol.Done(op.op))
        elif isinstance(op, protocol.GetStatus):
            self._emit(protocol.Status(op.op, {"branches": self.open_branches}))
        elif hasattr(op, "branch"):
            self._machine.take(op)
            self._machine.advance()
        else:
            error = InvalidRequest(f"there is no {type(op).__name__} here")
            self._emit(protocol.Failed.of(op.op, error))

    def _emit(self, event: protocol.Event) -> None:
        chunk = isinstance(event, protocol.Chunk)
        sink = self._sinks.get(event.op) if chunk else self._sinks.pop(event.op, None)
        if sink is not None:
            sink(event)

    def flush(self) -> None:
        pass

    def count_round_trip(self) -> None:
        self.counters.round_trips += 1

    def close(self) -> None:
        pass
