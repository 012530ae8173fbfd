"""Run of a program, from its first line to its end, and its branches on the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from rootlace.client.channel import Completion, Signal, call_in_loop, wait_for_event
from rootlace.client.endpoint import Answer, RuntimeEndpoint
from rootlace.language.failures import Failure, call_site
from rootlace.language.sampling import read_handling
from rootlace.language.variables import Pending
from rootlace.program.operations import Budget, Operation, Quoting, Recording
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import Cancelled, DeadlineExceeded, InvalidRequest, RootlaceError
from rootlace.wire.protocol import Part, Text

# Prefix -------------------------------------------------------------------------------------------
#
# A prefix that the programs of a batch share, and how a program's branch starts from it.


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Branch on the server with the text `texts`; `branch` is its id."""

    branch: int
    texts: tuple[Text, ...]


def merge(parts: Iterable[Text]) -> tuple[Text, ...]:
    """Join neighbouring texts of the same kind, so that texts cut differently compare equal."""
    merged: list[Text] = []
    for part in parts:
        if not part.text:
            continue
        if merged and merged[-1].special == part.special:
            merged[-1] = Text(merged[-1].text + part.text, special=part.special)
        else:
            merged.append(part)
    return tuple(merged)


class PrefixMatcher:
    """Matcher of a new branch's first text with the shared prefix; holds back undecided text."""

    def __init__(self, prefix: SharedPrefix) -> None:
        self.prefix = prefix
        self._held: list[Text] = []

    def feed(self, parts: Iterable[Part]) -> tuple[bool | None, tuple[Part, ...]]:
        """Take more of the branch's beginning. Returns (True, the rest after the prefix), (False,
        the whole text, which does not match), or (None, ()) while undecided."""
        parts = tuple(parts)
        if not all(isinstance(part, Text) for part in parts):
            return False, (*self._held, *parts)
        self._held.extend(part for part in parts if isinstance(part, Text))
        have, want = merge(self._held), self.prefix.texts
        for index, wanted in enumerate(want):
            if index == len(have):
                return None, ()
            got = have[index]
            last = index == len(want) - 1
            if got.special != wanted.special:
                return False, have
            if got.text == wanted.text:
                continue
            if last and got.text.startswith(wanted.text):
                rest = Text(got.text[len(wanted.text) :], special=got.special)
                return True, (rest, *have[index + 1 :])
            if index == len(have) - 1 and wanted.text.startswith(got.text):
                return None, ()
            return False, have
        return True, have[len(want) :]

    def give_up(self) -> tuple[Text, ...]:
        """Return all text held back; called before an operation without text."""
        return merge(self._held)


# Run ----------------------------------------------------------------------------------------------


_running: ContextVar[ProgramRun | None] = ContextVar("rootlace_run", default=None)
"""Run of the current program, also in the program's tasks."""


class ProgramRun:
    """Run of a program: its open branches, bounds and end.

    `defaults` are sampling options under canonical names; `timeout` and `cache.share` apply to the
    whole run. `adapter` is the first branch's; `token_budget` bounds the generated tokens; `name`
    is the program's. `ended` is finished once the program and all its operations are over. `error`
    is then the exception that ended the run, or None.
    """

    def __init__(
        self,
        endpoint: RuntimeEndpoint,
        defaults: Mapping[str, Any],
        *,
        stream: bool = False,
        prefix: SharedPrefix | None = None,
        program: str = "",
        adapter: str | None = None,
        token_budget: int | None = None,
        name: str = "",
    ) -> None:
        self._endpoint = endpoint  # keeps the connection open as long as the program is alive
        self.connection = endpoint.connect()
        self.chat: protocol.ChatFormat = chat_format.usable(self.connection.model.chat)
        self.defaults = {name: value for name, value in defaults.items() if name != "timeout"}
        whole = read_handling(defaults, "run()")
        self.share = whole.cache.share
        self.budget = Budget(whole.timeout, token_budget)
        self.stream = stream
        self.prefix = prefix
        self.adapter = adapter
        self.program = program or self.connection.next_program()
        self.name = name
        self.recording = Recording()
        self.signal = Signal()
        self.ended = Completion()
        self.error: BaseException | None = None
        self.cancelled = ""
        """Reason of a cancelled run, or ""."""
        self.thread: threading.Thread | None = None
        self._task: asyncio.Task[Any] | None = None
        self._open: dict[int, RemoteBranch] = {}
        self._closed: list[RemoteBranch] = []  # those whose operations are waited for at the end
        self._failed: list[RemoteBranch] = []

    def adopt(self, branch: RemoteBranch) -> None:
        self._open[branch.id] = branch

    def release(self, branch: RemoteBranch, abandoned: bool) -> None:
        """Record a closed `branch`; `finish` waits for its operations unless it is `abandoned`."""
        # Add before removing: `cancel`, in any thread, must not miss the branch.
        if branch.id in self._open and not abandoned:
            self._closed.append(branch)
        self._open.pop(branch.id, None)

    def note(self, failed: RemoteBranch) -> None:
        self._failed.append(failed)

    # ------------------------------------------------------------ the end

    def finish(self) -> list[Completion]:
        """Close every branch. Return the operations to wait for before `settle`."""
        for branch in list(self._open.values()):
            branch.close()
        ends = [branch.last for branch in self._closed]
        return [last for last in ends if last is not None and not last.done]

    def settle(self) -> None:
        """Raise the first failure that the program has not seen, once all operations are over."""
        for branch in self._failed:
            failure = branch.failure
            if failure is not None and not failure.seen and not branch.taken_back:
                raise failure.exception()

    def cancel(self, why: str = "the program was cancelled") -> None:
        """Abort the run, here and on the server. Callable from any thread."""
        self.cancelled = self.cancelled or why
        for branch in [*self._open.values(), *self._closed]:
            branch.cancel()
        self.connection.flush()

    def abandon(self) -> None:
        """Cancel the run if its last follower leaves before the end."""
        if not self.ended.done and not self.signal.heard:
            self.cancel("the reader of its text left before the end, which cancels the run")
            if self._task is not None:  # it may wait for something else than the server
                call_in_loop(self._task.get_loop(), self._task.cancel)

    @property
    def is_inside(self) -> bool:
        """Return whether the program itself is the caller."""
        return _running.get() is self

    def conclude(self, error: BaseException | None) -> None:
        """End the run with `error` or None, and wake all followers."""
        self.error = error
        self.recording.end()
        self._closed.clear()
        self.ended.finish()
        self.signal.fire()

    # ------------------------------------------------------------ waiting

    def wait_for(self, operations: Iterable[Pending]) -> None:
        """Block until all operations are over. Counts as one round trip if any was not."""

        def reader() -> None:
            """Ignore the signal."""

        if self.watched_from_outside():
            self.signal.subscribe(reader)  # wants the result, as those who follow do
        try:
            for operation in self._unfinished(operations):
                operation.wait()
        finally:
            self.signal.unsubscribe(reader)

    async def wait_for_async(self, operations: Iterable[Pending]) -> None:
        for operation in self._unfinished(operations):
            await operation.wait_async()

    def wait_for_any(self, operations: Sequence[Pending]) -> None:
        """Block until one of `operations` is over."""
        over = Completion()
        self._finish_with_any(over, operations)
        self.wait_for([over])

    async def wait_for_any_async(self, operations: Sequence[Pending]) -> None:
        over = Completion()
        self._finish_with_any(over, operations)
        await self.wait_for_async([over])

    def _finish_with_any(self, over: Completion, operations: Sequence[Pending]) -> None:
        for operation in operations:
            operation.add_callback(over.finish)

    def _unfinished(self, operations: Iterable[Pending]) -> Iterator[Pending]:
        """Yield operations that are unfinished at their turn; sends all before the first."""
        sent = False
        for operation in operations:
            if not operation.done:
                if not sent:
                    self.connection.count_round_trip()
                    self.connection.flush()
                    sent = True
                yield operation

    def watched_from_outside(self) -> bool:
        """Return whether the caller is a follower of the stream, not the program itself."""
        return self.thread is not None and threading.current_thread() is not self.thread

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Block until `condition` holds or the program is over."""
        event = threading.Event()
        self.signal.subscribe(event.set)
        try:
            while not condition() and not self.ended.done:
                wait_for_event(event)
                event.clear()
        finally:
            self.signal.unsubscribe(event.set)

    # ------------------------------------------------------------ running

    def execute(self, body: Callable[[], object]) -> None:
        """Run a synchronous program, and wait for all its operations."""
        with self._to_the_end():
            body()
            self.wait_for(self.finish())

    async def execute_async(self, body: Callable[[], Awaitable[object]]) -> None:
        """Run a coroutine function, and wait for all its operations."""
        with self._to_the_end():
            self._task = asyncio.current_task()
            await body()
            await self.wait_for_async(self.finish())

    @contextmanager
    def _to_the_end(self) -> Iterator[None]:
        """Run the block as the program: an exception or an unseen failure cancels the run."""
        error: BaseException | None = None
        before = _running.get()
        _running.set(self)
        try:
            yield
            self.settle()
        except BaseException as caught:
            error = caught
            if self.cancelled and isinstance(caught, asyncio.CancelledError):
                error = Cancelled(self.cancelled)  # the task's own error would cancel its readers
            self.error = error  # before anything is cancelled for it
            self.cancel()
            raise
        finally:
            _running.set(before)  # no token's reset: a coroutine may be closed in another context
            self.finish()
            self.connection.flush()
            self.conclude(error)


# Remote branch ------------------------------------------------------------------------------------


class RemoteBranch:
    """Branch on the server: sends operations and keeps the first failure; never waits for the
    server. Used by one thread (or loop) at a time, besides the I/O thread that reports events."""

    def __init__(
        self, run: ProgramRun, parent: RemoteBranch | None = None, adapter: str | None = None
    ) -> None:
        """Open the branch. `adapter` None means the parent's, or the run's."""
        self.id = run.connection.next_branch()
        self.failure: Failure | None = None
        self.last: Operation | None = None
        self._cancelled: Operation | None = None
        self.closed = ""
        self._run = run
        self._parent = parent
        self._adapter = run.adapter if parent is None else adapter
        self._opened = False
        self._matcher: PrefixMatcher | None = None
        self._abandoned = False
        self._stands = False  # a state went back to it
        self._left_for: int | None = None  # the mark that the state went back to
        self._children = 0
        self._quoting: list[Quoting] = []
        run.adopt(self)
        run.recording.open(self.id, None if parent is None else parent.id)
        if parent is not None:
            parent.ensure_open()
            parent._children += 1
            self._open(parent.id)
        elif run.prefix is not None:
            self._matcher = PrefixMatcher(run.prefix)

    # ------------------------------------------------------------ sending

    def ensure_open(self) -> None:
        """Open the branch on the server, unless it is open already."""
        if not self._opened:
            held = self._matcher.give_up() if self._matcher else ()
            self._matcher = None
            self._open(None)
            if held:
                self._append(held)

    def append(self, parts: tuple[protocol.Part, ...]) -> None:
        """Send text and tokens; the first text may be held back to find a shared prefix."""
        if self._matcher is not None:
            matches, parts = self._matcher.feed(parts)
            if matches is None:
                return
            parent = self._matcher.prefix.branch if matches else None
            self._matcher = None
            self._open(parent)
        else:
            self.ensure_open()
        if parts:
            self._append(parts)

    def quote(self, sources: Sequence[RemoteBranch]) -> None:
        """Append the texts of `sources` since their opening, without waiting for them."""
        self.ensure_open()
        operation = Quoting(self, call_site(), sources)
        for source in sources:
            source._quoting.append(operation)
        parts = tuple(protocol.Quote(source.id) for source in sources)
        self.issue(protocol.Append(self.next_op(), self.id, parts), operation)

    def next_op(self) -> int:
        return self._run.connection.next_op()

    def issue(self, op: protocol.Op, operation: Operation) -> None:
        """Send `op`, with its events to `operation`. Raises ProgramError if sending fails."""
        self.last = operation
        try:
            self._run.connection.send(op, operation)
        except InvalidRequest as error:
            self._refuse(operation, error)
        if self._run.cancelled:  # the canceller may not have seen this branch's latest operation
            self.cancel()

    def check_open(self) -> None:
        """Raise Cancelled or InvalidRequest if nothing can be appended any more."""
        if self._run.cancelled:
            raise Cancelled(self._run.cancelled)
        if self.closed:
            raise InvalidRequest(f"{self.closed}: its state can be read, but not appended to")

    def _open(self, parent: int | None) -> None:
        self._opened = True
        program = self._run.program if parent is None else ""
        op = protocol.Open(
            self.next_op(),
            self.id,
            parent=parent,
            program=program,
            adapter=self._adapter,
            share=self._run.share,
        )
        self.issue(op, Operation(self, call_site(), "opening a branch"))

    def _append(self, parts: tuple[protocol.Part, ...]) -> None:
        op = protocol.Append(self.next_op(), self.id, parts)
        self.issue(op, Operation(self, call_site(), "appending text"))

    def _refuse(self, operation: Operation, error: InvalidRequest) -> NoReturn:
        """End the unsendable `operation` as a failed one, and cancel the branch on the server."""
        operation.failure = failure = self.failed(operation, error)
        operation.finish()
        # Later operations would continue a text without this one: the branch is broken.
        self._run.connection.send(protocol.Cancel(self.next_op(), self.id), Answer())
        raise failure.exception()

    # ------------------------------------------------------------ reports of the I/O thread

    def late(self) -> DeadlineExceeded | None:
        return self._run.budget.late()

    def failed(self, operation: Operation, error: RootlaceError) -> Failure:
        """Return the failure that readers of `operation` see: the first cause, in any branch."""
        if isinstance(error, DeadlineExceeded):  # the request had the remaining time of the run
            error = self._run.budget.late() or error
        if isinstance(error, Cancelled) and self._run.cancelled:
            error = Cancelled(self._run.cancelled)
        if self.failure is None:
            self.failure = self._inherited(operation, error)
        if self.failure is None:
            ended_by = self._run.error if isinstance(error, Cancelled) else None
            self.failure = Failure(operation.site, operation.what, error, ended_by)
            if not self._abandoned:
                self._run.note(self)
        return self.failure

    def _inherited(self, operation: Operation, error: RootlaceError) -> Failure | None:
        if isinstance(operation, Quoting):
            for source in operation.sources:
                if source.failure is not None:
                    return source.failure
        if isinstance(error, Cancelled) and self._parent is not None:
            return self._parent.failure
        return None

    def notify(self) -> None:
        """Wake the run's followers."""
        self._run.signal.fire()

    # ------------------------------------------------------------ the end

    def close(self, why: str = "the program has ended") -> None:
        """Close the branch once its operations are over. Its text stays readable."""
        if self.closed:
            return
        self.closed = why
        self._run.release(self, self._abandoned)
        if self._opened:
            self._send_close()

    def cancel(self) -> None:
        """Abort the running and queued operations. Callable from any thread."""
        last = self.last
        if self._opened and last is not None and not (last.done or last is self._cancelled):
            self._cancelled = last
            self._run.connection.send(protocol.Cancel(self.next_op(), self.id), Answer())

    def drop(self) -> None:
        """Close a branch that the program has dropped; called by the garbage collector."""
        if not self.closed and not self._run.ended.done:
            self._abandoned = True
            if not self._children and not self._quoting:
                self.cancel()
            self.close("this fork was dropped")

    @property
    def taken_back(self) -> bool:
        """Return whether the branch was opened after a mark to which the state has gone back."""
        branch = self
        while branch._parent is not None and not branch._stands:
            left_for = branch._parent._left_for
            if left_for is not None and branch.id > left_for:  # ids grow
                return True
            branch = branch._parent
        return False

    def leave(self, other: RemoteBranch, mark: RemoteBranch) -> None:
        """Record that the state went back to `mark` and goes on in `other`."""
        other._stands = True
        self._stands, self._left_for = False, mark.id

    def abandon(self) -> None:
        """Drop the branch, and count its failure as seen."""
        self.drop()
        if self.failure is not None:
            self.failure.seen = True

    def _send_close(self) -> None:
        # A branch must live until those that quote it have got its text.
        for operation in self._quoting:
            if not operation.done:
                operation.add_callback(self._send_close)
                return
        self._run.connection.send(protocol.Close(self.next_op(), self.id), Answer())
