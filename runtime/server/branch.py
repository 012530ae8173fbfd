"""Branch of a program: a token sequence and the queue of operations on it."""

from __future__ import annotations

import asyncio
import logging
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

import msgspec

from rootlace.runtime.server.auth import Asker
from rootlace.runtime.server.sequence import TokenSequence
from rootlace.wire.errors import Cancelled, DeadlineExceeded, InternalError, RootlaceError
from rootlace.wire.protocol import Event, Failed

log = logging.getLogger(__name__)

T = TypeVar("T")


class Deadline(msgspec.Struct, frozen=True):
    """Deadline of an operation: `at` on the loop's clock, `seconds` after it was set."""

    at: float
    seconds: float

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded.after(self.seconds)


class Work(msgspec.Struct, frozen=True):
    """Queued work of a branch: an operation or, with op 0, an answer to another branch.

    `run` returns the terminal event, or None where op is 0. `always` work also runs on a broken
    branch (closing, answering a waiting branch). `done` is called once, however the work ends. At
    the `deadline` the work fails.
    """

    op: int
    run: Callable[[], Awaitable[Event | None]]
    always: bool = False
    done: Callable[[], None] | None = None
    deadline: Deadline | None = None


class Branch(TokenSequence):
    """Token sequence of a program: runs its queued work in order, one at a time.

    Work runs in the caller until it has to wait for something. From there on a task runs the queue
    to its end.
    """

    def __init__(
        self,
        branch_id: int,
        program: str,
        namespace: str,
        emit: Callable[[Event], None],
        adapter: str,
        asker: Asker,
        private: bool,
    ) -> None:
        super().__init__(namespace, program, adapter, asker, private)
        self.id = branch_id
        self.error: RootlaceError | None = None
        self.on_finished: Callable[[Branch, int, Event], None] | None = None
        """Callback for each operation's end, called before the client gets the event."""
        self._emit = emit
        self._queue: deque[Work] = deque()
        self._working = False
        self._task: asyncio.Task[None] | None = None
        self._waiting: asyncio.Future[object] | None = None
        self._overdue: DeadlineExceeded | None = None
        """Error of the running work once its deadline has passed."""

    def post(self, work: Work) -> None:
        """Run `work` behind the queued work, at once if the queue is empty."""
        self._queue.append(work)
        if self._working:
            return
        self._working = True
        drain = self._drain()
        try:
            waiting = drain.send(None)
        except StopIteration:
            return  # the usual case: opening, appending and closing wait for nothing
        self._task = asyncio.get_running_loop().create_task(_resume(drain, waiting))

    def interrupt(self, error: RootlaceError) -> None:
        """Break the branch now: the running operation and all queued ones fail."""
        self._break(error)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self.cancelled())

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Await a future that belongs to the running work alone; `interrupt` ends the wait."""
        if self.error is not None:
            if not future.cancel() and not future.cancelled():
                future.exception()  # asyncio complains of exceptions that are never retrieved
            raise self.cancelled()
        if self._overdue is not None:
            future.cancel()
            raise self._overdue
        self._waiting = future  # type: ignore[assignment]
        try:
            return await future
        finally:
            self._waiting = None

    def cancelled(self) -> Cancelled:
        """Return the error of every operation after the first failure."""
        return Cancelled(str(self.error))

    async def _drain(self) -> None:
        while self._queue:
            work = self._queue.popleft()
            event = await self._outcome(work)
            if work.done is not None:
                work.done()
            if event is not None:
                if self.on_finished is not None:
                    self.on_finished(self, work.op, event)
                self._emit(event)
        self._working = False
        self._task = None

    async def _outcome(self, work: Work) -> Event | None:
        try:
            if self.error is not None and not work.always:
                raise self.cancelled()
            if work.deadline is None:
                event = await work.run()
            else:
                event = await self._in_time(work.run, work.deadline)
            if self.error is not None and not work.always:
                raise self.cancelled()
            return event
        except RootlaceError as error:
            # The traceback's frames refer to this branch. Left to the garbage collector, refusals
            # would cost a server under overload a fifth of its time.
            failure = error.with_traceback(None)
        except Exception as error:
            log.exception("operation %d of branch %d", work.op, self.id)
            failure = InternalError.of(error)
        self._break(failure)
        return Failed.of(work.op, failure) if work.op else None

    async def _in_time(
        self, run: Callable[[], Awaitable[Event | None]], deadline: Deadline
    ) -> Event | None:
        """Return the result of `run`. Raises DeadlineExceeded if the deadline comes first."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline.at:
            raise deadline.error()
        timer = loop.call_at(deadline.at, self._expire, deadline)
        try:
            return await run()
        finally:
            timer.cancel()
            self._overdue = None

    def _expire(self, deadline: Deadline) -> None:
        self._overdue = deadline.error()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._overdue)

    def _break(self, error: RootlaceError) -> None:
        if self.error is None:
            self.error = error


async def _resume(begun: Coroutine[Any, Any, None], waiting: Any) -> None:
    """Run the rest of a coroutine that has begun and waits for `waiting`, as a task.

    Tasks that start at once by themselves came with Python 3.12.
    """
    await _rest(begun, waiting)


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                value = yield waiting
            except BaseException as error:  # the task is cancelled
                waiting = begun.throw(error)
            else:
                waiting = begun.send(value)
    except StopIteration:
        return
