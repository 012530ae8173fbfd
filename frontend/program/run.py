"""One run of a program, from its first line to its end: what its branches have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rootlace.client.channel import Completion, Signal, wait_for_event
from rootlace.language.failures import Failure
from rootlace.language.sampling import read_handling
from rootlace.language.variables import Pending
from rootlace.program.budget import Budget
from rootlace.program.recording import Recording
from rootlace.wire import chat_format, protocol
from rootlace.wire.protocol import Part, Text

if TYPE_CHECKING:
    from rootlace.client.endpoint import RuntimeEndpoint


# Prefix -------------------------------------------------------------------------------------------
#
# A prefix that the programs of a batch share, and how a program's branch starts from it.


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A branch on the server that holds `texts`; `branch` is its id."""

    branch: int
    texts: tuple[Text, ...]


def merge(parts: Iterable[Text]) -> tuple[Text, ...]:
    """Join neighbours of the same kind: how text is cut into pieces does not matter."""
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
    """Holds back a new branch's first text until it is known whether it starts with the prefix."""

    def __init__(self, prefix: SharedPrefix) -> None:
        self.prefix = prefix
        self._held: list[Text] = []

    def feed(self, parts: Iterable[Part]) -> tuple[bool | None, tuple[Part, ...]]:
        """Take more of the branch's beginning.

        Gives (True, what follows the prefix), (False, everything: it starts otherwise), or
        (None, ()) while it may still become either.
        """
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
        """Everything held back, because something that is not text follows."""
        return merge(self._held)


# Run ----------------------------------------------------------------------------------------------


class Member(Protocol):
    """A branch of a run, as far as the run deals with it."""

    @property
    def id(self) -> int: ...

    @property
    def last(self) -> Completion | None:
        """Its latest operation."""

    def close(self) -> None: ...

    def cancel(self) -> None: ...

    @property
    def failure(self) -> Failure | None: ...

    @property
    def taken_back(self) -> bool:
        """Whether a rollback undid it, so that its failure has never been."""


class ProgramRun:
    """Keeps the branches of a running program, and closes those that are left at its end.

    `defaults` are sampling options under canonical names, of which `timeout` and `cache.share` are
    those of the run as a whole; `adapter` is that of its first branch; `token_budget` is how many
    tokens it may generate; `name` is that of the program. `ended` is finished when the program and
    all its operations are over; `error` is then the exception that ended it, or None.
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
        self.cancelled = False
        self.thread: threading.Thread | None = None
        self._open: dict[int, Member] = {}
        self._closed: list[Member] = []  # those whose operations are waited for at the end
        self._failed: list[Member] = []

    def adopt(self, branch: Member) -> None:
        self._open[branch.id] = branch

    def release(self, branch: Member, abandoned: bool) -> None:
        """`branch` was closed. At the end, wait for what it still does unless it is `abandoned`."""
        # It enters one before it leaves the other: `cancel`, in any thread, must not miss it.
        if branch.id in self._open and not abandoned:
            self._closed.append(branch)
        self._open.pop(branch.id, None)

    def note(self, failed: Member) -> None:
        self._failed.append(failed)

    # ------------------------------------------------------------ the end

    def finish(self) -> list[Completion]:
        """Close every branch. Gives the operations to wait for before `settle`."""
        for branch in list(self._open.values()):
            branch.close()
        ends = [branch.last for branch in self._closed]
        return [last for last in ends if last is not None and not last.done]

    def settle(self) -> None:
        """All operations are over: raise the first failure that the program has not seen itself."""
        for branch in self._failed:
            failure = branch.failure
            if failure is not None and not failure.seen and not branch.taken_back:
                raise failure.exception()

    def cancel(self) -> None:
        """Abort everything, here and on the server. From any thread."""
        self.cancelled = True
        for branch in [*self._open.values(), *self._closed]:
            branch.cancel()
        self.connection.flush()

    def conclude(self, error: BaseException | None) -> None:
        """The program is over; wake everybody who follows it."""
        self.error = error
        self.recording.end()
        self._closed.clear()
        self.ended.finish()
        self.signal.fire()

    # ------------------------------------------------------------ waiting

    def wait_for(self, operations: Iterable[Pending]) -> None:
        """Block until all are over. Counts as one round trip if any was not."""
        for operation in self._unfinished(operations):
            operation.wait()

    async def wait_for_async(self, operations: Iterable[Pending]) -> None:
        for operation in self._unfinished(operations):
            await operation.wait_async()

    def wait_for_any(self, operations: Sequence[Pending]) -> None:
        """Block until one of them is over."""
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
        """Those that are not over when their turn comes. Before the first, everything is sent."""
        sent = False
        for operation in operations:
            if not operation.done:
                if not sent:
                    self.connection.count_round_trip()
                    self.connection.flush()
                    sent = True
                yield operation

    def watched_from_outside(self) -> bool:
        """Whether the caller is not the program itself but somebody who follows its stream."""
        return self.thread is not None and threading.current_thread() is not self.thread

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Block until `condition` holds or the program is over."""
        event = threading.Event()
        wake = event.set  # each access makes another object, and `unsubscribe` wants this one
        self.signal.subscribe(wake)
        try:
            while not condition() and not self.ended.done:
                wait_for_event(event)
                event.clear()
        finally:
            self.signal.unsubscribe(wake)

    # ------------------------------------------------------------ running

    def execute(self, body: Callable[[], Any]) -> Any:
        """Run a synchronous program, and wait for all its operations."""
        with self._to_the_end():
            value = body()
            self.wait_for(self.finish())
        return value

    async def execute_async(self, body: Callable[[], Any]) -> Any:
        """The same for a program that is a coroutine function."""
        with self._to_the_end():
            value = await body()
            await self.wait_for_async(self.finish())
        return value

    @contextmanager
    def _to_the_end(self) -> Iterator[None]:
        """For a block that runs the program: what it raises, or fails unseen, cancels the run."""
        error: BaseException | None = None
        try:
            yield
            self.settle()
        except BaseException as caught:
            error = caught
            self.cancel()
            raise
        finally:
            self.finish()
            self.connection.flush()
            self.conclude(error)
