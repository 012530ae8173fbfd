"""Branch of a running program: its appended text and operations."""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing
from typing import Any

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
from rootlace.language.failures import ProgramError, warn
from rootlace.language.tools import Offer, ToolCall, Tools
from rootlace.language.transcript import Conversation, Marked, Saved, StateText, Transcript
from rootlace.language.variables import Constant, Gathered, Pending, Readable, unknown
from rootlace.program.operations import Generation, Selection, logprob_meta
from rootlace.program.run import ProgramRun, RemoteBranch
from rootlace.timeline import Timeline
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import InvalidRequest, RootlaceError
from rootlace.wire.sampling import nth_seed, with_seed_of
from rootlace.wire.tool_calls import write_list

# Steps --------------------------------------------------------------------------------------------
#
# Generators of a running program's text: each yields new text, and None while there is none.


Step = tuple[str, dict[str, Any] | None]
"""New text, and its meta information."""
Steps = Generator[Step | None, None, None]


def _steps_of(readable: Readable, with_meta: bool) -> Steps:
    """Yield a generation's text as it arrives, another value once it is complete. Only `with_meta`
    makes meta information, since each one lists all tokens so far."""
    if not isinstance(readable, Generation):
        while not all(operation.done for operation in readable.requires()):
            yield None
        whole = readable.meta()
        yield str(readable.written()), whole if isinstance(whole, dict) else None
        return
    seen = length = 0
    ids: list[int] = []
    scores: list[protocol.TokenLogprob] = []
    done = False
    while not done:
        done = readable.done  # before reading: what comes later is read in the next round
        for chunk in readable.chunks_from(seen):
            seen += 1
            length += len(chunk.text)
            ids.extend(chunk.token_ids)
            scores.extend(chunk.logprobs)
            if with_meta and (chunk.text or chunk.token_ids):
                yield chunk.text, _meta_of(ids, scores)
            elif chunk.text:
                yield chunk.text, None
        if not done:
            yield None
    metas = readable.meta()
    yield readable.text()[length:], metas[0] if isinstance(metas, list) else metas


def _meta_of(ids: Sequence[int], scores: Sequence[protocol.TokenLogprob]) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": None,
        "completion_tokens": len(ids),
        "output_ids": list(ids),
    }
    return meta | (logprob_meta("output", scores) if scores else {})


def _with_new_scores(meta: dict[str, Any], start: int) -> dict[str, Any]:
    """Keep only log-probabilities of tokens from index `start` on, as sglang's pairs do."""
    cut = ("output_token_logprobs", "output_top_logprobs")
    return {name: value[start:] if name in cut else value for name, value in meta.items()}


# Branch -------------------------------------------------------------------------------------------


_TAG_PIECES = 64
"""Maximum number of non-empty pieces over which a message's end tag may be spread."""


class Branch:
    """Branch of a state: turns appended expressions into operations, and reads their results. Only
    reading waits for the server."""

    def __init__(
        self, run: ProgramRun, parent: Branch | None = None, adapter: str | None = None
    ) -> None:
        self.run = run
        self.remote: RemoteBranch = RemoteBranch(run, parent.remote if parent else None, adapter)
        self.transcript: Transcript = Transcript(parent.transcript if parent else None)
        self.conversation: Conversation = parent.conversation.copy() if parent else Conversation()
        self.variables: dict[str, Readable] = dict(parent.variables) if parent else {}
        self._inherited: Mapping[str, Readable] = dict(self.variables)
        self._restored: Mapping[str, Readable] = {}
        """Variables of the state `after` from which the run continues."""
        self.defaults: Mapping[str, Any] = parent.defaults if parent else run.defaults
        self.seed_offset: int = parent.seed_offset if parent else 0
        self._parts: list[protocol.Part] = []
        self._start = self.transcript.start
        self._caller: Branch | None = None
        self._became: Branch | None = None
        self.wait_for, self.wait_for_async = run.wait_for, run.wait_for_async
        self.wait_for_any, self.wait_for_any_async = run.wait_for_any, run.wait_for_any_async

    def fork(self, size: int, adapter: str | None = None) -> list[Branch]:
        """Fork `size` branches at the end of this one, with its adapter or another one."""
        self.remote.check_open()
        forks = [Branch(self.run, self, adapter) for _ in range(size)]
        for fork in forks:
            # A fork that the program drops is closed, even while its operations run.
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
        while branch is not None:  # callers' branches move, too
            branch.remote = other.remote
            branch.transcript = other.transcript
            branch.conversation = other.conversation
            branch._became = other  # whose end would give the branch back
            branch._parts = []
            branch = branch._caller
        for name in self.variables.keys() - other.variables.keys():
            del self.variables[name]
        self.variables.update(other.variables)
        left.abandon()
        self.remote.notify()

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
        inner._parts = []
        inner._caller = self  # a fork is closed once no object refers to it
        return inner

    def join(self, forks: Sequence[Branch], mode: str) -> None:
        """End `forks` and bring back their variables or texts, without waiting."""
        if mode == "gather_variable":
            self._gather(forks)
        else:
            self._quote(forks)
        for fork in forks:
            fork.remote.close("this fork was joined")

    def _gather(self, forks: Sequence[Branch]) -> None:
        parts_of: dict[str, list[Readable]] = {}
        for fork in forks:
            for name, variable in fork.variables.items():
                if variable is not fork._inherited.get(name):
                    parts_of.setdefault(name, []).append(variable)
        for name, parts in parts_of.items():
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
        self._append_pieces(saved.pieces, saved.model)
        self._restored = saved.variables
        self.variables.update(saved.variables)

    # ------------------------------------------------------------ writing

    def append(self, expression: Appendable) -> None:
        """Send the operations of `expression`. Raises at once only for local errors."""
        self.remote.check_open()
        for item in items(expression):
            self._append_one(item)
        self._send_parts()
        self.remote.notify()

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
            if self.run.chat.tools.refused:
                raise InvalidRequest(f"tools(): {self.run.chat.tools.refused}")
            listing = write_list(self.run.chat.tools, [each.definition() for each in item])
            for text, special in listing:
                self._append_one(TemplateText(text) if special else text)
        elif isinstance(item, TemplateText):
            if item.text:
                self._parts.append(protocol.Text(item.text, special=True))
                self.transcript.append(Marked(item.text, item))
        elif isinstance(item, TokenIds):
            self._add_tokens(Marked("", item), item)
        elif isinstance(item, ImagePart):
            self._add_image(item)
        else:
            raise TypeError(f"{item!r} can only be appended while a program is traced")

    def _append_pieces(self, pieces: Iterable[str], model: str) -> None:
        """Append `pieces` of a state of `model`."""
        same = model == self.run.connection.model.path
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
        if isinstance(text, StateText) and text.has_roles and self.conversation.role is None:
            self._append_pieces(text.pieces, self.run.connection.model.path)
        else:
            self._add_text(sampling.plain(text))

    def _add_text(self, text: str) -> None:
        talk, transcript = self.conversation, self.transcript
        if talk.role == "tool":  # the result of a tool cannot end itself and go on as another role
            before, end = "", len(transcript)
            for piece in transcript.slice(max(talk.start, end - _TAG_PIECES), end):
                before = before + piece if isinstance(piece, str) else ""
            text = chat_format.enclosed(text, self.run.chat.roles["tool"].end, before)
        if text:
            self._parts.append(protocol.Text(text))
            transcript.append(text)

    def _add_tokens(self, piece: Marked, item: TokenIds) -> None:
        if item.ids:
            self._parts.append(protocol.Tokens(item.ids))
            self.transcript.append(piece)

    def _add_image(self, item: ImagePart) -> None:
        model = self.run.connection.model
        if not model.images:
            error = InvalidRequest(
                f"{model.name} reads text only; OpenAIBackend, AnthropicBackend and LiteLLMBackend "
                "pass images on to models that see"
            )
            raise ProgramError(item.site, "image()", error) from error
        self._parts.append(item.part)
        self.transcript.append(Marked("", item))

    def _generate(self, expression: Gen) -> None:
        site = expression.site
        try:
            form = self.run.chat.tools
            resolved = sampling.resolve(self.defaults, expression.options, form=form)
            handling = self.run.budget.in_time(resolved.handling)
            seeded = with_seed_of(resolved.params, self.seed_offset * resolved.params.n)
            params, share = self.run.budget.bounded(seeded)
        except RootlaceError as error:
            raise ProgramError(site, expression.what, error) from error
        if resolved.constraint is None:
            self._check_end(expression.what)
        self._send_parts()
        self.remote.ensure_open()
        operation = Generation(
            self.remote, site, expression.what, expression.name, params, resolved.type, share
        )
        self._record(expression.name, operation)
        tools = expression.options.get("tools", self.defaults.get("tools"))
        if tools is not None:
            self.conversation.offer = Offer(tools, operation, form, resolved.constraint is not None)
        op = protocol.Generate(
            op=self.remote.next_op(),
            branch=self.remote.id,
            name=expression.name or "",
            params=params,
            constraint=resolved.constraint,
            # A budget counts the streamed tokens of a cancelled generation.
            stream=self.run.stream or share is not None,
            cache_report=resolved.cache_report,
            handling=handling,
            prediction=resolved.prediction,
        )
        self.remote.issue(op, operation)

    def _check_end(self, what: str) -> None:
        """Warn of a space before free text: a word's token includes the space before the word, so a
        model never saw a word behind a token for the space alone."""
        end = len(self.transcript)
        for piece in self.transcript.slice(end - 1, end):
            if isinstance(piece, str) and not isinstance(piece, Marked) and piece.endswith(" "):
                warn(
                    f"{what}: the text before it ends with a space, after which a model writes "
                    "worse: the space belongs to the token of the next word"
                )

    def _select(self, expression: Select) -> None:
        try:
            handling = sampling.handling_of(self.defaults, expression.options)
            handling = self.run.budget.in_time(handling)
        except RootlaceError as error:
            raise ProgramError(expression.site, expression.what, error) from error
        seed = expression.options.get("seed", self.defaults.get("seed"))
        if seed is not None:
            seed = nth_seed(seed, self.seed_offset)
        self._send_parts()
        self.remote.ensure_open()
        operation = Selection(
            self.remote, expression.site, expression.what, expression.name, expression.choices
        )
        self._record(expression.name, operation)
        op = protocol.Select(
            op=self.remote.next_op(),
            branch=self.remote.id,
            choices=expression.choices,
            name=expression.name or "",
            method=expression.method,
            temperature=expression.temperature,
            handling=handling,
            seed=seed if expression.temperature > 0 else None,
        )
        self.remote.issue(op, operation)

    def _record(self, name: str | None, operation: Generation | Selection) -> None:
        self.transcript.append(operation)
        self.run.recording.take(self.remote.id, operation)
        if name is not None:
            self.variables[name] = operation

    def _begin_role(self, expression: RoleBegin) -> None:
        talk = self.conversation
        try:
            if talk.role is not None:
                raise InvalidRequest(f"the {talk.role} message before it has not ended")
            texts = chat_format.begin(self.run.chat, expression.role, talk.opened)
        except InvalidRequest as error:
            raise ProgramError(expression.site, f"{expression.role}()", error) from error
        self._add_template(texts, expression)
        talk.begin(expression.role, self.transcript)

    def _end_role(self, expression: RoleEnd) -> None:
        talk = self.conversation
        if talk.role != expression.role:
            reason = f"the message that is open is {talk.role or 'none'}"
            error = InvalidRequest(f"a {expression.role} message ends, but {reason}")
            raise ProgramError(expression.site, f"{expression.role}_end()", error) from error
        talk.end(expression.role, self.transcript)
        self._add_template(chat_format.end(self.run.chat, expression.role), expression)

    def _add_template(self, texts: Sequence[protocol.Text], role: RoleBegin | RoleEnd) -> None:
        self._parts.extend(texts)
        self.transcript.append(Marked("".join(text.text for text in texts), role))

    def _send_parts(self) -> None:
        parts, self._parts = tuple(self._parts), []
        if parts:
            self.run.recording.take(self.remote.id, parts)
            self.remote.append(parts)

    # ------------------------------------------------------------ reading

    @property
    def streams(self) -> bool:
        return self.run.stream

    def find(self, name: str) -> Readable:
        """Return the variable `name`; a follower of a running program first waits for the name."""
        run, variables = self.run, self.variables
        if run.watched_from_outside() and not self._is_named(name):
            run.wait_until(lambda: self._is_named(name))
        variable = variables.get(name)
        if variable is None:
            if run.error is not None:
                raise run.error
            raise unknown(name, variables)
        return variable

    def _is_named(self, name: str) -> bool:
        """Return whether this run, not a restored state, has named the variable."""
        return name in self.variables and self.variables[name] is not self._restored.get(name)

    def pending(self) -> Iterator[Pending]:
        if self.run.watched_from_outside():
            yield self.run.ended
        if self.remote.last is not None:  # of a program that raised, it may end a little later
            yield self.remote.last

    def text(self) -> StateText:
        self._raise_failure()
        return StateText(self.transcript.excerpt().pieces())

    def messages(self) -> list[dict[str, str]]:
        self._raise_failure()
        return self.conversation.messages()

    def error(self) -> BaseException | None:
        if self.run.ended.done and self.run.error is not None:
            return self.run.error
        return None if self.remote.failure is None else self.remote.failure.exception()

    def check_end(self) -> None:
        run = self.run
        if run.watched_from_outside():
            self.wait_for([run.ended])
        if run.ended.done and run.error is not None:
            raise run.error

    def follow(self, name: str | None) -> Generator[str, None, None]:
        inside = self.run.is_inside
        try:
            with closing(self.steps(name, with_meta=False)) as steps:
                for text, _ in steps:
                    if text:
                        yield text
        except (GeneratorExit, KeyboardInterrupt):
            if not inside:
                self.run.abandon()
            raise

    async def follow_async(self, name: str | None, with_meta: bool) -> AsyncGenerator[Any, None]:
        start = 0
        inside = self.run.is_inside
        try:
            async with aclosing(self.steps_async(name, with_meta)) as steps:
                async for text, meta in steps:
                    if text and with_meta:
                        yield text, meta and _with_new_scores(meta, start)
                    elif text:
                        yield text
                    if meta and text:
                        start = 0 if meta.get("finish_reason") else meta.get("completion_tokens", 0)
        except (GeneratorExit, asyncio.CancelledError):
            if not inside:
                self.run.abandon()
            raise

    def steps(self, name: str | None, with_meta: bool = True) -> Generator[Step, None, None]:
        """Yield the text of the branch, or of the variable `name`, as it arrives. Raises the error
        of a failed program at the end."""
        event = threading.Event()
        with closing(self._steps(name, with_meta, event.set)) as steps:
            for step in steps:
                if step is not None:
                    yield step
                else:
                    wait_for_event(event)
                    event.clear()

    async def steps_async(
        self, name: str | None, with_meta: bool = True
    ) -> AsyncGenerator[Step, None]:
        """Yield as `steps` does, without blocking the running event loop."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        with closing(self._steps(name, with_meta, lambda: call_in_loop(loop, event.set))) as steps:
            for step in steps:
                if step is not None:
                    yield step
                else:
                    await event.wait()
                    event.clear()

    def _steps(self, name: str | None, with_meta: bool, wake: Callable[[], object]) -> Steps:
        """Yield new text. After a None, ask again once `wake` was called."""
        run = self.run
        source = self._text_steps(with_meta) if name is None else self._named_steps(name, with_meta)
        run.signal.subscribe(wake)
        try:
            for step in source:
                if step is None:
                    run.connection.flush()
                yield step
        finally:
            run.signal.unsubscribe(wake)
        if run.ended.done and run.error is not None:
            raise run.error

    def _text_steps(self, with_meta: bool) -> Steps:
        index = 0
        while True:
            ended, begun = self.run.ended.done, index
            transcript = self.transcript  # the branch may have become another one, which begins so
            for piece in transcript.slice(index, len(transcript)):
                index += 1
                if not isinstance(piece, str):
                    yield from _steps_of(piece, with_meta)
                elif piece:
                    yield piece, None
            if ended:
                return
            if index == begun:  # else the run may have ended since
                yield None

    def _named_steps(self, name: str, with_meta: bool) -> Steps:
        """Yield one variable, once it is named. Raises UnknownVariable if it never is."""
        while not (self.run.ended.done or self._is_named(name)):
            yield None
        yield from _steps_of(self.find(name), with_meta)

    def _raise_failure(self) -> None:
        if self.remote.failure is not None:
            raise self.remote.failure.exception()
