"""A client's session: its branches, and the dispatch of operations to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from rootlace.runtime.contracts import messages
from rootlace.runtime.server import sequence as growth
from rootlace.runtime.server.auth import Account, Asker, namespace_of
from rootlace.runtime.server.branch import Branch, Deadline, Work
from rootlace.runtime.server.generate import Generation
from rootlace.runtime.server.score import Selection, embed
from rootlace.runtime.server.sequence import OpenSequences, SequenceState
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import nothing
from rootlace.runtime.server.session_log import SessionLog
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RootlaceError,
    ServerUnavailable,
    from_code,
)
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Close,
    Done,
    Embed,
    Event,
    Explain,
    Failed,
    FlushCache,
    Generate,
    GetStatus,
    Goodbye,
    Hello,
    Op,
    Open,
    Ping,
    Prefill,
    Quote,
    Select,
    Status,
    Text,
    Tokens,
    Unpin,
)

# Backlog ------------------------------------------------------------------------------------------


# Waiting operations may take as much memory as this many messages of the largest size.
_MESSAGES = 4
# Memory of a waiting operation beside its text, in bytes.
_OPERATION_BYTES = 1024

Sized = Append | Prefill | Generate | Select | Explain | Embed


class Backlog:
    """Bytes of the operations that wait, with a bound."""

    def __init__(self, max_message_bytes: int) -> None:
        self._bound = _MESSAGES * max_message_bytes
        self._waiting = 0

    def add(self, op: Sized) -> partial[None]:
        """Count `op`; the caller calls the returned function when `op` has ended. Raises Overloaded
        if the waiting operations would exceed the bound."""
        size = _size(op)
        if self._waiting + size > self._bound:
            raise Overloaded(
                f"operations of {self._waiting} bytes wait already; at most {self._bound} may"
            )
        self._waiting += size
        return partial(self._remove, size)

    def _remove(self, size: int) -> None:
        self._waiting -= size


def _size(op: Sized) -> int:
    """Estimate the bytes that a waiting operation takes."""
    size = _OPERATION_BYTES
    if isinstance(op, Append | Embed):
        for part in op.parts if isinstance(op, Append) else op.inputs:
            size += len(part.text) if isinstance(part, Text) else 64
            size += 32 * len(part.ids) if isinstance(part, Tokens) else 0
    elif isinstance(op, Select):
        size += sum(map(len, op.choices))
    elif isinstance(op, Generate) and op.constraint is not None:
        size += len(op.constraint.source)
    return size


# Session ------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

MAX_REFUSED = 4096
"""Most branches of a session remembered as refused, oldest forgotten first."""

_Snapshot = asyncio.Future[Any]


class Session:
    """Session of a client: takes operations, gives events. Belongs to the event loop that made it.

    Every operation gets exactly one terminal event; events of one branch come in the order of its
    operations. A client's mistakes raise nothing. After `close` there are no more events.
    """

    def __init__(
        self,
        model: ServedModel,
        on_events: Callable[[list[Event]], None],
        client: str = "",
        account: Account | None = None,
        source: str = "",
        log: SessionLog | None = None,
    ) -> None:
        """`on_events` gets new events at most once per turn of the loop. `log` records the session,
        and holds what an earlier server recorded."""
        self.client = client
        self.log = log
        self.closed = False
        self._account = account
        self._model = model
        self._on_events = on_events
        self._loop = asyncio.get_running_loop()
        self._alive = OpenSequences(model, self.end, Asker.of(account, source))
        """Open branches, and closing ones until they are closed."""
        self._branches: dict[int, Branch] = {}
        # Branches whose `Close` waits behind other operations: they can still be cancelled.
        self._closing: dict[int, Branch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: list[Event] = []
        self._backlog = Backlog(model.config.max_message_bytes)
        self._refused: dict[int, str] = {}
        """Reasons why branches were refused, not even opened as broken ones: there are too many."""
        if log is not None:
            self._restore(log)

    @property
    def busy(self) -> bool:
        """Return whether the client has branches or waits for an answer."""
        return bool(self._alive.open or self._tasks)

    def handle(self, ops: list[Op]) -> None:
        """Start operations, in order. Returns at once, and raises nothing for a client's faults."""
        for op in ops:
            if self.closed:
                return
            if self.log is not None and (ended := self.log.answers(op)):
                for event in ended:  # the client lost the event with a connection
                    self._emit(event)
                continue
            try:
                self._dispatch(op)
            except RootlaceError as error:
                self._emit(Failed.of(op.op, error))

    def reject(self, op: int, branch: int | None, error: RootlaceError) -> None:
        """Fail an operation that could not be decoded, and break the branch that it names."""
        target = self._branches.get(branch) if branch is not None else None
        if target is None or op <= 0:
            self._emit(Failed.of(max(op, 0), error))
        else:
            target.post(Work(op, partial(_raise, error)))

    def end(self, error: RootlaceError) -> None:
        """Close without a wish of the client; the last event says why."""
        if not self.closed:
            self._events.append(Failed.of(0, error))
            self._deliver()
            self.close()

    def close(self) -> None:
        """Cancel everything and free every branch."""
        if self.closed:
            return
        self.closed = True
        if self.log is not None:
            self.log.detach()
        self._events.clear()
        for task in self._tasks:
            task.cancel()
        error = Cancelled("the connection was closed")
        for branch in self._alive.open:
            if isinstance(branch, Branch):
                branch.interrupt(error)
        self._alive.close()
        self._branches.clear()
        self._closing.clear()
        self._on_events = nothing  # the receiver may refer to this session

    # ------------------------------------------------------------ dispatch

    def _dispatch(self, op: Op) -> None:
        if isinstance(op, Hello):
            raise ProtocolError("a second hello")
        if op.op <= 0:
            raise InvalidRequest(f"operation ids begin at 1, not {op.op}")
        if isinstance(op, Open):
            self._refused.pop(op.branch, None)
            try:
                self._open(op)
            except Overloaded as error:
                self._refused[op.branch] = str(error)
                if len(self._refused) > MAX_REFUSED:
                    del self._refused[next(iter(self._refused))]
                raise
        elif isinstance(op, Append | Prefill | Generate | Select | Explain | Close | Cancel):
            branch = self._branches.get(op.branch)
            if branch is None and isinstance(op, Cancel):
                branch = self._closing.get(op.branch)
            if branch is None and op.branch in self._refused:
                raise Cancelled(self._refused[op.branch])
            if branch is None:
                raise InvalidRequest(f"branch {op.branch} is not open")
            self._on_branch(op, branch)
        elif isinstance(op, Ping):
            if self.log is not None:
                self.log.heard(op.heard)
            self._emit(Done(op.op))
        elif isinstance(op, Goodbye):
            if self.log is not None:
                self.log.end()
            self._emit(Done(op.op))
            self._deliver()
            self.close()
        elif isinstance(op, GetStatus):
            self._spawn(op.op, _status(self._model, op.op, self._account))
        elif isinstance(op, Unpin):
            self._spawn(op.op, _unpin(self._model, op, self._account))
        elif isinstance(op, Embed):
            self._admit()
            done = self._backlog.add(op)
            self._spawn(op.op, embed(self._model, op, self._alive.asker), done)
        else:
            assert isinstance(op, FlushCache)
            if self._account is not None:
                raise InvalidRequest("the cache is not this key's alone; the operator may flush it")
            self._spawn(op.op, _flush(self._model, op.op))

    def _on_branch(
        self, op: Append | Prefill | Generate | Select | Explain | Close | Cancel, branch: Branch
    ) -> None:
        if isinstance(op, Close):
            del self._branches[op.branch]
            self._closing[op.branch] = branch
            branch.post(Work(op.op, partial(self._close, op, branch), always=True))
            return
        if isinstance(op, Cancel):
            branch.interrupt(Cancelled("cancelled by the client"))
            branch.post(Work(op.op, partial(_done, op.op), always=True))
            return
        model, log = self._model, self.log
        try:
            done = self._backlog.add(op)
        except RootlaceError as error:
            branch.interrupt(error)
            if log is not None:
                log.broke(branch)
            raise
        if isinstance(op, Generate | Select | Prefill):
            try:
                branch.check_handling(op.handling)
                self._admit(counts=not isinstance(op, Prefill))
            except RootlaceError as error:
                branch.post(Work(op.op, partial(_raise, error), done=done))
                return
        run: Callable[[], Awaitable[Event]]
        if isinstance(op, Append):
            quoted = [part.branch for part in op.parts if isinstance(part, Quote)]
            quotes = [self._quote(op.op, at, other) for at, other in enumerate(quoted)]
            run = partial(growth.append, model, branch, op, quotes)
        elif isinstance(op, Prefill):
            run = partial(growth.prefill, model, branch, op)
        elif isinstance(op, Explain):
            run = partial(growth.explain, model, branch, op)
        elif isinstance(op, Generate):
            saved = None if log is None else log.generation(op.op)
            run = Generation(model, branch, op, self._emit, saved, timeline=True).run
        else:
            run = Selection(model, branch, op).run
        deadline = None
        if isinstance(op, Generate | Select | Prefill) and op.handling.timeout is not None:
            seconds = op.handling.timeout
            deadline = Deadline(self._loop.time() + seconds, seconds)
        branch.post(Work(op.op, run, done=done, deadline=deadline))

    def _admit(self, counts: bool = True) -> None:
        if self._account is None:
            return
        if counts:
            self._account.admit()
        else:
            self._account.check()

    # ------------------------------------------------------------ opening, closing, quoting

    def _open(self, op: Open) -> None:
        if op.branch in self._branches:
            raise InvalidRequest(f"branch {op.branch} is open already")
        parent = self._branches.get(op.parent) if op.parent is not None else None
        program = self._alive.program(op.program)
        namespace, adapter = self._alive.namespace(op.namespace, op.share), op.adapter or ""
        if parent is not None:
            program, namespace = parent.program, parent.namespace
            adapter = parent.adapter if op.adapter is None else op.adapter
        self._alive.check_share()
        bound, count = self._model.config.max_branches, self._model.branch_count
        refused: RootlaceError | None = None
        if count >= bound:
            refused = Overloaded(f"{bound} branches are open; the server allows no more")
            if count >= 2 * bound:
                raise refused
        elif op.parent is not None and parent is None:
            refused = InvalidRequest(f"parent branch {op.parent} is not open")
        else:
            try:
                if parent is None and self._model.drain.begun:
                    raise self._model.drain.refusal()
                self._model.check_adapter(adapter)
            except (InvalidRequest, ServerUnavailable) as error:
                refused = error
        branch = Branch(
            op.branch,
            program,
            namespace,
            self._emit,
            adapter,
            self._alive.asker,
            private=not op.share if parent is None else parent.private,
        )
        self._register(branch)
        if (log := self.log) is not None:
            log.opening(branch, op)
        if refused is not None:
            branch.post(Work(op.op, partial(_raise, refused)))
        elif parent is None:
            branch.post(Work(op.op, partial(_done, op.op)))
        else:
            taken = nothing if log is None else partial(_forked, log, branch, parent)
            state = self._snapshot(parent, True, taken)
            branch.post(Work(op.op, partial(_adopt, branch, state, op.op)))

    def _register(self, branch: Branch) -> None:
        self._branches[branch.id] = branch
        self._alive.add(branch)
        if self.log is not None:
            branch.on_finished = self.log.finished

    def _restore(self, log: SessionLog) -> None:
        """Open the branches that the log holds."""
        for saved, state in log.branches():
            branch = Branch(
                saved.branch,
                self._alive.program(saved.program),
                saved.namespace,
                self._emit,
                saved.adapter,
                self._alive.asker,
                saved.private,
            )
            branch.paid, branch.state = saved.paid, state
            try:
                self._model.check_adapter(saved.adapter)
            except InvalidRequest as error:  # the server was started without the adapter
                branch.error = error
            if saved.broken is not None:
                branch.error = from_code(*saved.broken)
            self._register(branch)
            log.restored(branch)

    async def _close(self, op: Close, branch: Branch) -> Event:
        if self._closing.get(op.branch) is branch:  # the id may have been used again
            del self._closing[op.branch]
        self._alive.release(branch)
        return Done(op.op)

    def _quote(self, op: int, at: int, branch_id: int) -> _Snapshot:
        """Return a future of a branch's gained text after the operations sent so far."""
        branch, log = self._branches.get(branch_id), self.log
        known = None if log is None else log.quote(op, at)
        if known is None and branch is None:
            known = InvalidRequest(f"quoted branch {branch_id} is not open")
        if known is not None:
            future = self._loop.create_future()
            future.set_result(known)
            return future
        assert branch is not None
        taken = nothing if log is None else partial(log.quoted, op, at)
        return self._snapshot(branch, False, taken)

    def _snapshot(self, branch: Branch, fork: bool, taken: Callable[[Any], None]) -> _Snapshot:
        """Return a future of the branch's state (`fork`) or gained text after the queued
        operations.

        `taken` receives the value at once. An error is the future's result, not its exception: the
        future may never be awaited, and asyncio complains of exceptions that are never retrieved.
        """
        future: _Snapshot = self._loop.create_future()
        branch.post(Work(0, partial(self._answer, branch, fork, future, taken), always=True))
        return future

    async def _answer(
        self, branch: Branch, fork: bool, future: _Snapshot, taken: Callable[[Any], None]
    ) -> None:
        value: SequenceState | tuple[Piece, ...] | RootlaceError
        if fork and branch.error is None and not future.done():
            # Tokenize settled text once here, not once per child.
            try:
                await growth.settle(self._model, branch)
            except RootlaceError as error:
                branch.interrupt(error)
        if branch.error is not None:
            value = branch.cancelled()
        else:
            state = branch.state
            value = state.fork() if fork else growth.gained_text(self._model, state)
        if not future.done():
            taken(value)
            future.set_result(value)

    # ------------------------------------------------------------ operations without a branch

    def _spawn(
        self, op: int, work: Coroutine[Any, Any, Event], done: Callable[[], None] = nothing
    ) -> None:
        async def run() -> None:
            try:
                self._emit(await work)
            except RootlaceError as error:
                self._emit(Failed.of(op, error))
            except Exception as error:
                log.exception("operation %d", op)
                self._emit(Failed(op, InternalError.code, str(InternalError.of(error))))

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: done())

    # ------------------------------------------------------------ events

    def _emit(self, event: Event) -> None:
        if self.closed:
            return
        if self.log is not None:
            self.log.emitted(event)
        if not self._events:
            self._model.deliveries.soon(self._deliver)
        self._events.append(event)

    def _deliver(self) -> None:
        events, self._events = self._events, []
        if events and not self.closed:
            if self.log is not None:
                self.log.flush()
            self._on_events(events)


async def _status(model: ServedModel, op: int, account: Account | None) -> Event:
    return Status(op, await model.status(account))


async def _flush(model: ServedModel, op: int) -> Event:
    await model.flush()
    return Done(op)


async def _unpin(model: ServedModel, op: Unpin, account: Account | None) -> Event:
    # Without keys the id is enough: clients are not told apart.
    namespace = None if account is None else namespace_of(account, op.namespace)
    if not await model.engine.ask(messages.Unpin, op.pin, namespace):
        raise InvalidRequest(f"there is no pin {op.pin!r}")
    return Done(op.op)


async def _done(op: int) -> Event:
    return Done(op)


def _forked(
    log: SessionLog, branch: Branch, parent: Branch, state: SequenceState | RootlaceError
) -> None:
    if not isinstance(state, RootlaceError):
        log.opened(branch, parent)


async def _raise(error: RootlaceError) -> Event:
    raise error


async def _adopt(branch: Branch, snapshot: _Snapshot, op: int) -> Event:
    """Give a child its parent's state."""
    state = await branch.wait(snapshot)
    if isinstance(state, RootlaceError):
        raise state
    branch.state = state
    return Done(op)
