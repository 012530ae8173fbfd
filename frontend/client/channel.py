"""The interface of connections for programs, waiting for results, and channels without a socket.

`Connection` has a socket; local channels have none. For what is no Rootlace server, a `Machine`
does the operations of a client's branches in their order, as docs/internals.md says.

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
        # Of a dictionary, no thread can lose what another one does.
        self._subscribers: dict[Callable[[], object], None] = {}

    @property
    def heard(self) -> bool:
        """Whether anybody waits for it."""
        return bool(self._subscribers)

    def subscribe(self, callback: Callable[[], object]) -> None:
        self._subscribers[callback] = None

    def unsubscribe(self, callback: Callable[[], object]) -> None:
        self._subscribers.pop(callback, None)

    def fire(self) -> None:
        for callback in list(self._subscribers):
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


MAX_FRAME_BYTES = 32 * 2**20
"""Half of what a gateway accepts by default."""

Sink = Callable[[protocol.Event], None]
"""Gets every event of one operation; the last one is terminal."""


@dataclass
class Counters:
    """Counts of one connection; `round_trips`: how often a program had to wait."""

    messages_sent: int = 0
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


def pack(op: protocol.Op) -> msgspec.Raw:
    """`op` as it travels. Raises InvalidRequest for what no frame can carry."""
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
# A client's branches without a model. What a `Generate` or `Select` gives is asked of `answer`;
# everything else is done here.


class BranchText:
    """A branch: what it holds, as `text` and as the `parts` it was made of, and its queue."""

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
        """The parent has got to where this branch was opened."""
        assert self.parent is not None
        self.text, self.parts = self.parent.text, list(self.parent.parts)
        self._start, self.started = len(self.text), True


Ask = protocol.Generate | protocol.Select
Answer = Callable[[BranchText, Ask], "list[protocol.Event] | None"]
"""The events of an operation, the last of which is terminal; None: not yet. May raise an
error, with which the operation fails. What is generated is added to the branch here."""


class Machine:
    """The branches of one client. `emit` gets every event; `spell` is the text of a token's id."""

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
        """Queue an operation of a branch; `advance` runs what can run."""
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
        """Run everything that can run."""
        moved = True
        while moved:
            moved = False
            for number, branch in list(self.branches.items()):
                while branch.started and branch.queue and self._run(number, branch):
                    branch.queue.popleft()
                    branch.finished += 1
                    moved = True

    def _run(self, number: int, branch: BranchText) -> bool:
        """The next operation of the branch; False if it cannot run yet."""
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
# A connection without a socket: operations are done where they are sent.


class LocalChannel:
    """Does the operations of a client with a `Machine`, in the thread that sends them; one at a
    time, whoever sends. Events come before `send` returns, or to whoever is at it already.

    `check` raises InvalidRequest for an operation that is to be refused at the line that sends it.
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
        pack(op)  # what no frame can carry is refused here, too
        self._sinks[op.op] = sink
        self.call(lambda: self._do(op))

    def call(self, what: Callable[[], object]) -> None:
        """Have `what` called when nothing else is under way: now, or by whoever is at it."""
        self._inbox.append(what)
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                while self._inbox:
                    self._inbox.popleft()()
            finally:
                self._lock.release()

    def wake(self) -> None:
        """An answer that was not there yet may be there now. From any thread."""
        self.call(self._machine.advance)

    def tell(self, event: protocol.Event) -> None:
        """Give an event to its sink, before the operation has its answer. From any thread."""
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
