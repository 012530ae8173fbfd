"""A client's branches without a model: operations run in their order, as docs/internals.md says.

What a `Generate` or `Select` gives is asked of `answer`; everything else is done here.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from rootlace.client.channel import Counters, Sink
from rootlace.client.connection import pack
from rootlace.wire import protocol
from rootlace.wire.errors import InternalError, InvalidRequest, RootlaceError


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
        self.counters.ops_sent += 1
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
