"""A branch of a running program: what it has appended, as text and as operations."""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from typing import Any, Protocol

from rootlace.client.channel import call_in_loop, wait_for_event
from rootlace.language import sampling
from rootlace.language.expressions import (
    Appendable,
    Gen,
    ImagePart,
    RoleBegin,
    RoleEnd,
    Select,
    TemplateText,
    TokenIds,
    items,
)
from rootlace.language.failures import ProgramError
from rootlace.language.tools import Offer, ToolCall, Tools
from rootlace.language.transcript import Conversation, Marked, Piece, Saved, StateText, Transcript
from rootlace.language.variables import Constant, Gathered, Pending, Readable, unknown
from rootlace.program.operations import Generation, Selection, logprob_meta
from rootlace.program.run import ProgramRun, RemoteBranch
from rootlace.timeline import Timeline
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest, RootlaceError
from rootlace.wire.protocol import write_list

# Cursors ------------------------------------------------------------------------------------------


Step = tuple[str, dict[str, Any] | None]


class Cursor(Protocol):
    def read(self) -> tuple[list[Step], bool]:
        """What is new, as pairs of text and meta information, and whether it was the last."""
        ...


class _GenerationReader:
    """Reads one generation while it runs.

    Each chunk's meta information lists all tokens so far, so it is made only `with_meta`.
    """

    def __init__(self, generation: Generation, with_meta: bool) -> None:
        self._generation = generation
        self._with_meta = with_meta
        self._seen = 0
        self._length = 0
        self._ids: list[int] = []

    def read(self) -> tuple[list[Step], bool]:
        done = self._generation.done  # before reading: what comes later is for the next call
        steps: list[Step] = []
        for chunk in self._generation.chunks_from(self._seen):
            self._seen += 1
            self._length += len(chunk.text)
            if self._with_meta:
                if chunk.text or chunk.token_ids:
                    steps.append((chunk.text, self._meta(chunk)))
            elif chunk.text:
                steps.append((chunk.text, None))
        if done:
            metas = self._generation.meta()
            rest = self._generation.text()[self._length :]
            steps.append((rest, metas[0] if isinstance(metas, list) else metas))
        return steps, done

    def _meta(self, chunk: protocol.Chunk) -> dict[str, Any]:
        self._ids.extend(chunk.token_ids)
        meta: dict[str, Any] = {
            "finish_reason": None,
            "completion_tokens": len(self._ids),
            "output_ids": list(self._ids),
        }
        if chunk.logprobs:
            meta.update(logprob_meta("output", chunk.logprobs))
        return meta


def _read_whole(readable: Readable) -> tuple[list[Step], bool]:
    if not all(operation.done for operation in readable.requires()):
        return [], False
    meta = readable.meta()
    return [(str(readable.written()), meta if isinstance(meta, dict) else None)], True


class TextCursor:
    """The whole text of a branch, from its first piece."""

    def __init__(self, run: ProgramRun, transcript: Transcript, with_meta: bool = True) -> None:
        self._run = run
        self._transcript = transcript
        self._with_meta = with_meta
        self._index = 0
        self._reader: _GenerationReader | None = None

    def read(self) -> tuple[list[Step], bool]:
        ended = self._run.ended.done
        transcript = self._transcript
        steps: list[Step] = []
        for piece in transcript.slice(self._index, len(transcript)):
            new, finished = self._read_piece(piece)
            steps.extend(new)
            if not finished:
                return steps, False
            self._index += 1
            self._reader = None
        return steps, ended

    def _read_piece(self, piece: Piece) -> tuple[list[Step], bool]:
        if isinstance(piece, str):
            return [(piece, None)] if piece else [], True
        if isinstance(piece, Generation):
            if self._reader is None:
                self._reader = _GenerationReader(piece, self._with_meta)
            return self._reader.read()
        return _read_whole(piece)


class VariableCursor:
    """One variable, from the moment the program names it. If it never does, there is no text."""

    def __init__(
        self,
        run: ProgramRun,
        variables: Mapping[str, Readable],
        name: str,
        with_meta: bool = True,
    ) -> None:
        self._run = run
        self._variables = variables
        self._name = name
        self._with_meta = with_meta
        self._reader: _GenerationReader | None = None

    def read(self) -> tuple[list[Step], bool]:
        ended = self._run.ended.done
        if self._reader is None:
            variable = self._variables.get(self._name)
            if variable is None:
                return [], ended
            if not isinstance(variable, Generation):
                return _read_whole(variable)
            self._reader = _GenerationReader(variable, self._with_meta)
        return self._reader.read()


def follow(run: ProgramRun, cursor: Cursor) -> Iterator[Step]:
    """Yield text as it comes. At the end, raises what ended the program if it failed."""
    event = threading.Event()
    with closing(_steps(run, cursor, event.set)) as steps:
        for step in steps:
            if step is not None:
                yield step
            else:
                wait_for_event(event)
                event.clear()


async def follow_async(run: ProgramRun, cursor: Cursor) -> AsyncIterator[Step]:
    """The same without blocking the running event loop."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    with closing(_steps(run, cursor, lambda: call_in_loop(loop, event.set))) as steps:
        for step in steps:
            if step is not None:
                yield step
            else:
                await event.wait()
                event.clear()


def _steps(
    run: ProgramRun, cursor: Cursor, wake: Callable[[], object]
) -> Generator[Step | None, None, None]:
    """What is new; None where nothing is: go on once `wake` has been called."""
    run.signal.subscribe(wake)
    try:
        while True:
            steps, finished = cursor.read()
            yield from steps
            if finished:
                break
            run.connection.flush()
            yield None
    finally:
        run.signal.unsubscribe(wake)
    if run.ended.done and run.error is not None:
        raise run.error


# Branch -------------------------------------------------------------------------------------------


# Writer -------------------------------------------------------------------------------------------
#
# Writing to a branch of a run: expressions become operations as they are appended.


_TAG_PIECES = 64
"""In so many pieces of a message, each a character or more, the tag that ends it may be written."""


class BranchWriter:
    """The writer of a `Branch`: notes what is appended and sends it; never waits for the server."""

    def __init__(
        self,
        run: ProgramRun,
        remote: RemoteBranch,
        transcript: Transcript,
        conversation: Conversation,
        variables: dict[str, Readable],
        defaults: Mapping[str, Any],
    ) -> None:
        self._run = run
        self._remote = remote
        self._transcript = transcript
        self._conversation = conversation
        self._variables = variables
        self._defaults = defaults
        self._parts: list[protocol.Part] = []

    def append(self, expression: Appendable) -> None:
        """Send what `expression` stands for. Raises at once only for what no server could do."""
        self._remote.check_open()
        for item in items(expression):
            self._append_one(item)
        self._send_parts()
        self._remote.notify()

    def _append_one(self, item: Appendable) -> None:
        if isinstance(item, str):
            self._add_string(item)
        elif isinstance(item, Gen):
            self._generate(item)
        elif isinstance(item, Select):
            self._select(item)
        elif isinstance(item, RoleBegin):
            self._begin_role(item)
        elif isinstance(item, RoleEnd):
            self._end_role(item)
        elif isinstance(item, Tools):
            if self._run.chat.tools.refused:
                raise InvalidRequest(f"tools(): {self._run.chat.tools.refused}")
            listing = write_list(self._run.chat.tools, [each.definition() for each in item])
            for text, special in listing:
                self._append_one(TemplateText(text) if special else text)
        elif isinstance(item, TemplateText):
            if item.text:
                self._parts.append(protocol.Text(item.text, special=True))
                self._transcript.append(Marked(item.text, item))
        elif isinstance(item, TokenIds):
            self._add_tokens(Marked("", item), item)
        elif isinstance(item, ImagePart):
            self._add_image(item)
        else:
            raise TypeError(f"{item!r} can only be appended while a program is traced")

    def restore(self, pieces: Iterable[str], model: str) -> None:
        """Append `pieces`, which a state of `model` held."""
        same = model == self._run.connection.model.path
        for piece in pieces:
            item = piece.item if isinstance(piece, Marked) else piece
            if isinstance(item, TokenIds) and same:
                assert isinstance(piece, Marked)
                self._add_tokens(piece, item)
            elif isinstance(item, TokenIds) and not piece:
                raise InvalidRequest(f"the state holds token ids of another model, {model}")
            elif isinstance(item, (RoleBegin, RoleEnd, TemplateText, ImagePart)):
                self._append_one(item)
            else:
                self._add_text(str(piece))
        self._send_parts()

    def _add_string(self, text: str) -> None:
        if isinstance(text, StateText) and text.has_roles and self._conversation.role is None:
            self.restore(text.pieces, self._run.connection.model.path)
        else:
            self._add_text(str(text))

    def _add_text(self, text: str) -> None:
        talk, transcript = self._conversation, self._transcript
        if talk.role == "tool":  # the result of a tool cannot end itself and go on as another role
            before, end = "", len(transcript)
            for piece in transcript.slice(max(talk.start, end - _TAG_PIECES), end):
                before = before + piece if isinstance(piece, str) else ""
            text = chat_format.enclosed(text, self._run.chat.roles["tool"].end, before)
        if text:
            self._parts.append(protocol.Text(text))
            transcript.append(text)

    def _add_tokens(self, piece: Marked, item: TokenIds) -> None:
        if item.ids:
            self._parts.append(protocol.Tokens(item.ids))
            self._transcript.append(piece)

    def _add_image(self, item: ImagePart) -> None:
        model = self._run.connection.model
        if not model.images:
            error = InvalidRequest(
                f"{model.name} reads text only; OpenAIBackend, AnthropicBackend and LiteLLMBackend "
                "pass images on to models that see"
            )
            raise ProgramError(item.site, "image()", error) from error
        self._parts.append(item.part)
        self._transcript.append(Marked("", item))

    def _generate(self, expression: Gen) -> None:
        site = expression.site
        try:
            form = self._run.chat.tools
            asked = sampling.resolve(self._defaults, expression.options, form=form)
            handling = self._run.budget.in_time(asked.handling)
            params, share = self._run.budget.bounded(asked.params)
        except RootlaceError as error:
            raise ProgramError(site, expression.what, error) from error
        self._send_parts()
        self._remote.ensure_open()
        operation = Generation(
            self._remote, site, expression.what, expression.name, params, asked.type, share
        )
        self._record(expression.name, operation)
        tools = expression.options.get("tools", self._defaults.get("tools"))
        if tools is not None and asked.constraint is not None:  # with "none", nothing is called
            self._conversation.offer = Offer(tools, operation, form)
        op = protocol.Generate(
            op=self._remote.next_op(),
            branch=self._remote.id,
            name=expression.name or "",
            params=params,
            constraint=asked.constraint,
            # Of what is cancelled, a budget counts what has come by then.
            stream=self._run.stream or share is not None,
            cache_report=asked.cache_report,
            handling=handling,
            prediction=asked.prediction,
        )
        self._remote.issue(op, operation)

    def _select(self, expression: Select) -> None:
        try:
            handling = self._run.budget.in_time(sampling.handling_of(self._defaults, {}))
        except DeadlineExceeded as error:
            raise ProgramError(expression.site, expression.what, error) from error
        self._send_parts()
        self._remote.ensure_open()
        operation = Selection(
            self._remote, expression.site, expression.what, expression.name, expression.choices
        )
        self._record(expression.name, operation)
        op = protocol.Select(
            op=self._remote.next_op(),
            branch=self._remote.id,
            choices=expression.choices,
            name=expression.name or "",
            method=expression.method,
            temperature=expression.temperature,
            handling=handling,
        )
        self._remote.issue(op, operation)

    def _record(self, name: str | None, operation: Generation | Selection) -> None:
        self._transcript.append(operation)
        self._run.recording.take(self._remote.id, operation)
        if name is not None:
            self._variables[name] = operation

    def _begin_role(self, expression: RoleBegin) -> None:
        talk = self._conversation
        try:
            if talk.role is not None:
                raise InvalidRequest(f"the {talk.role} message before it has not ended")
            texts = chat_format.begin(self._run.chat, expression.role, talk.opened)
        except InvalidRequest as error:
            raise ProgramError(expression.site, f"{expression.role}()", error) from error
        self._add_template(texts, expression)
        talk.begin(expression.role, self._transcript)

    def _end_role(self, expression: RoleEnd) -> None:
        talk = self._conversation
        if talk.role != expression.role:
            reason = f"the message that is open is {talk.role or 'none'}"
            error = InvalidRequest(f"a {expression.role} message ends, but {reason}")
            raise ProgramError(expression.site, f"{expression.role}_end()", error) from error
        talk.end(expression.role, self._transcript)
        self._add_template(chat_format.end(self._run.chat, expression.role), expression)

    def _add_template(self, texts: Sequence[protocol.Text], role: RoleBegin | RoleEnd) -> None:
        self._parts.extend(texts)
        self._transcript.append(Marked("".join(text.text for text in texts), role))

    def _send_parts(self) -> None:
        parts, self._parts = tuple(self._parts), []
        if parts:
            self._run.recording.take(self._remote.id, parts)
            self._remote.append(parts)


# Reader -------------------------------------------------------------------------------------------
#
# Reading what a branch of a run holds.


class BranchReader:
    """The reader of a `Branch`; see `rootlace.language.state.Reader`."""

    def __init__(
        self,
        run: ProgramRun,
        remote: RemoteBranch,
        transcript: Transcript,
        conversation: Conversation,
        variables: Mapping[str, Readable],
    ) -> None:
        self._run = run
        self._remote = remote
        self._transcript = transcript
        self._conversation = conversation
        self._variables = variables

    @property
    def streams(self) -> bool:
        return self._run.stream

    def find(self, name: str) -> Readable:
        """The variable `name`; whoever follows a running program waits until it is named."""
        run, variables = self._run, self._variables
        if run.watched_from_outside() and name not in variables:
            run.wait_until(lambda: name in variables)
        found = variables.get(name)
        if found is None:
            if run.error is not None:
                raise run.error
            raise unknown(name, variables)
        return found

    def pending(self) -> tuple[Pending, ...]:
        if self._run.watched_from_outside():
            return (self._run.ended,)
        return () if self._remote.last is None else (self._remote.last,)

    def wait_for(self, pending: Iterable[Pending]) -> None:
        self._run.wait_for(pending)

    async def wait_for_async(self, pending: Iterable[Pending]) -> None:
        await self._run.wait_for_async(pending)

    def wait_for_any(self, pending: Sequence[Pending]) -> None:
        self._run.wait_for_any(pending)

    async def wait_for_any_async(self, pending: Sequence[Pending]) -> None:
        await self._run.wait_for_any_async(pending)

    def text(self) -> StateText:
        self._raise_failure()
        return StateText(self._transcript.excerpt().pieces())

    def messages(self) -> list[dict[str, str]]:
        self._raise_failure()
        return self._conversation.messages()

    def error(self) -> BaseException | None:
        if self._run.ended.done and self._run.error is not None:
            return self._run.error
        return None if self._remote.failure is None else self._remote.failure.exception()

    def follow(self, name: str | None) -> Iterator[str]:
        try:
            for text, _ in follow(self._run, self._cursor(name, with_meta=False)):
                if text:
                    yield text
        except KeyboardInterrupt:  # Ctrl-C while waiting for more
            self._run.cancel()
            raise

    async def follow_async(self, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
        async for text, meta in follow_async(self._run, self._cursor(name, with_meta)):
            if with_meta:
                yield text, meta
            elif text:
                yield text

    def _cursor(self, name: str | None, with_meta: bool) -> Cursor:
        if name is None:
            return TextCursor(self._run, self._transcript, with_meta)
        return VariableCursor(self._run, self._variables, name, with_meta)

    def _raise_failure(self) -> None:
        if self._remote.failure is not None:
            raise self._remote.failure.exception()


# Branch -------------------------------------------------------------------------------------------


class Branch:
    """What a state stands on: written to, read, forked and joined. Never waits for the server."""

    def __init__(
        self, run: ProgramRun, parent: Branch | None = None, adapter: str | None = None
    ) -> None:
        self.run = run
        self.remote: RemoteBranch = RemoteBranch(run, parent.remote if parent else None, adapter)
        self.transcript: Transcript = Transcript(parent.transcript if parent else None)
        self.conversation: Conversation = parent.conversation.copy() if parent else Conversation()
        self.variables: dict[str, Readable] = dict(parent.variables) if parent else {}
        self.defaults: Mapping[str, Any] = parent.defaults if parent else run.defaults
        self._attach()
        self._start = self.transcript.start
        self._caller: Branch | None = None
        self._became: Branch | None = None

    def _attach(self) -> None:
        """Have a reader and a writer of what the branch holds now."""
        held = self.run, self.remote, self.transcript, self.conversation, self.variables
        self.reader = BranchReader(*held)
        self._writer = BranchWriter(*held, self.defaults)

    def append(self, expression: Appendable) -> None:
        self._writer.append(expression)

    def fork(self, size: int, adapter: str | None = None) -> list[Branch]:
        """`size` branches that start where this one stands, with its adapter or another one."""
        self.remote.check_open()
        forks = [Branch(self.run, self, adapter) for _ in range(size)]
        for fork in forks:
            # A fork that the program lets go of is given back, whatever it still does.
            weakref.finalize(fork, fork.remote.drop).atexit = False
        return forks

    def mark(self) -> Branch:
        if self.run.stream:
            raise InvalidRequest("what has been streamed cannot be taken back: try it in a fork")
        return self.fork(1)[0]

    def go_back(self, mark: Branch) -> None:
        left, other = self.remote, mark.mark()
        left.leave(other.remote, mark.remote)
        self.become(other)

    def become(self, other: Branch) -> None:
        left = self.remote
        branch: Branch | None = self
        while branch is not None:  # those whose programs called this one stand there, too
            branch.remote = other.remote
            branch.transcript = other.transcript
            branch.conversation = other.conversation
            branch._became = other  # whose end would give the branch back
            branch._attach()
            branch = branch._caller
        self.variables.clear()
        self.variables.update(other.variables)
        left.abandon()

    def drop(self) -> None:
        self.remote.abandon()

    def take_offer(self) -> Offer | None:
        offer, self.conversation.offer = self.conversation.offer, None
        return offer

    def called(self, call: ToolCall) -> None:
        self.run.recording.called(self.remote.id, call)

    def timeline(self) -> Timeline:
        run = self.run
        return run.recording.timeline(run.name, run.connection.model.name, run.error)

    def scope(self, name: str, defaults: Mapping[str, Any]) -> Branch:
        inner = copy.copy(self)
        inner.variables = {}
        inner.defaults = {**self.defaults, **defaults}
        inner._attach()
        inner._caller = self  # a fork is given back when nobody holds it any more
        return inner

    def join(self, forks: Sequence[Branch], mode: str) -> None:
        """End `forks` and bring back their variables, or their texts. Nothing is waited for."""
        if mode == "gather_variable":
            self._gather(forks)
        else:
            self._quote(forks)
        for fork in forks:
            fork.remote.close("this fork was joined")

    def _gather(self, forks: Sequence[Branch]) -> None:
        found: dict[str, list[Readable]] = {}
        for fork in forks:
            for name, variable in fork.variables.items():
                if name not in self.variables:
                    found.setdefault(name, []).append(variable)
        for name, parts in found.items():
            self.variables[name] = Gathered(parts)

    def _quote(self, forks: Sequence[Branch]) -> None:
        self.remote.check_open()
        if any(fork.transcript.start != fork._start for fork in forks):
            raise InvalidRequest(
                "join(): what a fork holds from before a rollback or a choice cannot be quoted; "
                "append its text(), or gather its variables"
            )
        self.remote.quote([fork.remote for fork in forks])
        for fork in forks:
            self.transcript.append(fork.transcript.excerpt(fork.transcript.start))

    def position(self) -> int:
        return len(self.transcript)

    def name_from(self, position: int, name: str) -> None:
        self.variables[name] = self.transcript.excerpt(position)

    def set_variable(self, name: str, value: object) -> None:
        self.variables[name] = Constant(value)

    def saved(self) -> Saved:
        variables = {name: variable.saved() for name, variable in self.variables.items()}
        pieces = tuple(self.transcript.excerpt().pieces())
        return Saved(self.run.connection.model.path, pieces, variables)

    def restore(self, saved: Saved) -> None:
        self._writer.restore(saved.pieces, saved.model)
        self.variables.update(saved.variables)
