"""A branch: a growing token sequence and the queue of operations on it."""

from __future__ import annotations

import asyncio
import logging
import types
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.server.auth import Account
from rootlace.runtime.server.core import Core, Requests
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    RootlaceError,
)
from rootlace.wire.protocol import (
    Append,
    Done,
    Event,
    Explain,
    Explained,
    Failed,
    Image,
    Prefill,
    Quote,
    SamplingParams,
    Text,
    Usage,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class BranchState:
    """What a branch holds; a fork is a copy of it.

    `ids` are int32, four bytes a token, copied by a fork (a memcpy: 16 KiB for 4,096 tokens).
    `pending` is text whose tokens may still change; strings are shared between forks. `begin` says
    whether the sequence starts as the tokenizer's post-processor would have it (None: not decided
    yet). `gained` is what was added since the branch was opened, as text or as ids; ids become text
    only if another branch quotes them (`growth.gained_text`).
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    pending: tuple[Piece, ...] = ()
    begin: bool | None = None
    gained: list[Piece | array[int]] = field(default_factory=list)

    @property
    def previous(self) -> int | None:
        return self.ids[-1] if self.ids else None

    @property
    def begins(self) -> bool:
        return self.begin is not False

    def pending_length(self) -> int:
        return sum(len(piece.text) for piece in self.pending)

    def prompt(self) -> np.ndarray:
        """The ids as the engine takes them: int32, a copy."""
        return np.array(self.ids, np.int32)

    def fork(self) -> BranchState:
        return BranchState(self.ids[:], self.pending, self.begin)


@dataclass(frozen=True)
class Deadline:
    """`at` this time of the loop's clock, `seconds` after it was set."""

    at: float
    seconds: float

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded.after(self.seconds)


@dataclass(frozen=True)
class Work:
    """One thing to do on a branch: an operation or, with op 0, an answer to another branch.

    `run` returns the terminal event, or None where op is 0. `always` work runs on a broken branch
    too (closing, answering a waiting branch). `done` is called once, however it ends. At the
    `deadline` it fails.
    """

    op: int
    run: Callable[[], Awaitable[Event | None]]
    always: bool = False
    done: Callable[[], None] | None = None
    deadline: Deadline | None = None


class Branch:
    """Runs its work in order, one piece at a time.

    Work runs in the caller as long as it does not have to wait for anything; from there on, a task
    runs it that ends with the queue.
    """

    def __init__(
        self,
        branch_id: int,
        program: str,
        namespace: str,
        emit: Callable[[Event], None],
        adapter: str = "",
        account: Account | None = None,
        source: str = "",
    ) -> None:
        self.id = branch_id
        self.program = program
        self.namespace = namespace
        self.adapter = adapter
        self.account = account
        self.source = source
        """Where its requests come from, if no account says whose they are."""
        self.paid = 0
        """So many of its tokens were charged for prefills, and are not for what comes next."""
        self.private = False
        """Whether its namespace is its own, and that of its descendants."""
        self.closed = False
        self.state = BranchState()
        self.error: RootlaceError | None = None
        self.on_finished: Callable[[Branch, int, Event], None] | None = None
        """Told of each operation's end, before its client is."""
        self._emit = emit
        self._queue: deque[Work] = deque()
        self._working = False
        self._task: asyncio.Task[None] | None = None
        self._waiting: asyncio.Future[object] | None = None
        self._overdue: DeadlineExceeded | None = None
        """What the work under way fails with, once it has had its time."""

    def post(self, work: Work) -> None:
        """Run `work` behind what is queued; now, if that is nothing."""
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
        """Break the branch now: the operation under way and all queued ones fail."""
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
        """What every operation after the first failure fails with."""
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
            # Its traceback has the frames that have this branch: left to the garbage collector,
            # refusals would cost a server under overload a fifth of its time.
            failure = error.with_traceback(None)
        except Exception as error:
            log.exception("operation %d of branch %d", work.op, self.id)
            failure = InternalError.of(error)
        self._break(failure)
        return Failed.of(work.op, failure) if work.op else None

    async def _in_time(
        self, run: Callable[[], Awaitable[Event | None]], deadline: Deadline
    ) -> Event | None:
        """What `run` gives, if it does before the deadline."""
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
    """The rest of a coroutine that has begun and waits for `waiting`, for a task to run.

    (Tasks that start at once by themselves came with Python 3.12.)
    """
    await _rest(begun, waiting)


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                said = yield waiting
            except BaseException as error:  # the task is cancelled
                waiting = begun.throw(error)
            else:
                waiting = begun.send(said)
    except StopIteration:
        return


# Growth -------------------------------------------------------------------------------------------
#
# How a branch grows without sampling: appended parts, settled tokens, prefill.


# Short texts are joined to pieces of up to this many characters: the cost of an append grows with
# the number of pieces, and a program may append word by word.
_JOINED_CHARACTERS = 4096


async def append(
    core: Core, branch: Branch, op: Append, quotes: list[asyncio.Future[Any]]
) -> Event:
    """Add text (it stays pending), ids, or what quoted branches gained.

    Raises InvalidRequest for ids outside the vocabulary, text that is not Unicode or a quote of an
    unknown branch, ContextLengthExceeded for what can never fit.
    """
    state = branch.state
    waiting = iter(quotes)
    for part in op.parts:
        if isinstance(part, Text):
            _check_unicode(part.text)
            _add_piece(state, Piece(part.text, part.special))
        elif isinstance(part, Quote):
            gained = await branch.wait(next(waiting))
            if isinstance(gained, RootlaceError):
                raise type(gained)(f"quoted branch {part.branch}: {gained}")
            for piece in gained:
                _add_piece(state, piece)
        elif isinstance(part, Image):
            raise InvalidRequest(f"{core.model_info.name} reads text only: it takes no images")
        else:
            await _add_ids(core, branch, part.ids)
    _check_size(core, state)
    return Done(op.op)


async def settle(core: Core, branch: Branch, everything: bool = False) -> None:
    """Tokenize pending text: what later text cannot change, or `everything` (for `Generate`)."""
    state = branch.state
    if not state.pending and not (everything and not state.ids and state.begins):
        return
    tokenizer = core.tokenizer
    length = state.pending_length()
    if everything:
        ids = await core.tokenize(
            length, tokenizer.encode_pieces, state.pending, state.previous, state.begins
        )
        rest: tuple[Piece, ...] = ()
    else:
        ids, rest = await core.tokenize(
            length, tokenizer.settle, state.pending, state.previous, state.begins
        )
    state.ids.extend(ids)
    state.pending = rest


async def prefill(core: Core, branch: Branch, op: Prefill) -> Event:
    """Compute the KV of the settled tokens."""
    await settle(core, branch)
    ids = branch.state.ids
    if not ids:
        return Done(op.op, Usage())
    check_fits(core, len(ids), room=0)
    cached = 0

    def note(update: EngineOutput) -> None:
        nonlocal cached
        cached = update.cached_tokens if update.cached_tokens is not None else cached

    requests = Requests(core.engine, branch.account, branch.source, branch.paid)
    params = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
    requests.add(
        lambda rid: EngineRequest(
            rid,
            branch.state.prompt(),
            params,
            namespace=branch.namespace,
            adapter=branch.adapter,
            program=branch.program,
            handling=op.handling,
        ),
        note,
    )
    branch.paid = len(ids)
    await requests.finish(branch.wait)
    return Done(op.op, Usage(prompt_tokens=len(ids), cached_tokens=cached))


async def explain(core: Core, branch: Branch, op: Explain) -> Event:
    """How far the branch is cached, pending text included; the branch stays as it is."""
    state = branch.state
    pending = await core.tokenize(
        state.pending_length(),
        core.tokenizer.encode_pieces,
        state.pending,
        state.previous,
        state.begins,
    )
    prompt = np.concatenate((state.prompt(), np.array(pending, np.int32)))
    if not len(prompt):
        raise InvalidRequest("the branch is empty: there is nothing to explain", "prompt")
    return Explained(op.op, await core.explain(prompt, branch.namespace, branch.adapter))


def gained_text(core: Core, state: BranchState) -> tuple[Piece, ...]:
    """What the branch gained since it was opened, as text."""
    pieces = []
    for gained in state.gained:
        if isinstance(gained, Piece):
            pieces.append(gained)
        elif text := core.tokenizer.decode(gained):
            pieces.append(Piece(text))
    return tuple(pieces)


def check_fits(core: Core, prompt: int, room: int, known: str = "") -> None:
    """Raises ContextLengthExceeded unless `room` tokens fit behind a prompt; `known` says how well
    the prompt's length is known."""
    limit = core.max_prompt
    if prompt + room <= limit:
        return
    window = core.model_info.context_length
    # Clients recognise the case by these words, which are OpenAI's.
    what = f"this model's maximum context length is {window} tokens"
    if limit < window:
        what += f", of which the KV cache holds {limit}"
    verb = "does not fit" if prompt > limit else "leaves no room for another token"
    raise ContextLengthExceeded(f"the prompt of {known}{prompt} tokens {verb}: {what}")


def _add_piece(state: BranchState, piece: Piece) -> None:
    if state.begin is None and not (piece.special and not piece.text):
        state.begin = not piece.special
    if not piece.text:
        return
    state.gained.append(piece)
    *before, last = state.pending or (Piece("", piece.special),)
    if last.special == piece.special and len(last.text) + len(piece.text) <= _JOINED_CHARACTERS:
        state.pending = (*before, Piece(last.text + piece.text, piece.special))
    else:
        state.pending += (piece,)


async def _add_ids(core: Core, branch: Branch, ids: tuple[int, ...]) -> None:
    vocabulary = core.model_info.vocab_size
    try:
        added = array("i", ids)
    except OverflowError:
        added = None
    # Negative ids are large ones without a sign.
    if added is None or (added and np.frombuffer(added, np.uint32).max() >= vocabulary):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocabulary)
        raise InvalidRequest(f"{bad} is not a token id (the vocabulary has {vocabulary})")
    state = branch.state
    if state.begin is None:
        state.begin = False
    await settle(core, branch, everything=bool(state.pending))
    state.ids.extend(added)
    state.gained.append(added)


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: {error}") from error


def _check_size(core: Core, state: BranchState) -> None:
    """Refuse text that can never fit, before tokenizing it costs memory and time."""
    at_least = len(state.ids) + state.pending_length() // core.tokenizer.longest_token
    check_fits(core, at_least, room=0, known="at least ")
