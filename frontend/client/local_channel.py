"""A connection without a socket: operations are done where they are sent."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import deque
from collections.abc import Callable

from rootlace.client.channel import Counters, Sink
from rootlace.client.connection import pack
from rootlace.client.machine import Answer, Machine
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest, RootlaceError


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
        self._model = model
        self._ids = itertools.count(1)
        self._session = uuid.uuid4().hex
        self._sinks: dict[int, Sink] = {}
        self._check = check
        self._machine = Machine(answer, self._emit, spell)
        self._inbox: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()

    @property
    def model(self) -> protocol.ModelInfo:
        return self._model

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
            self._emit(protocol.Failed(op.op, error.code, str(error)))

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
