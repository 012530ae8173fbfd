"""A branch: the operations a program has sent for one of its states, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rootlace.client.completion import Completion
from rootlace.language import sampling
from rootlace.language.expressions import (
    Appendable,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    TokenIds,
    items,
)
from rootlace.language.failures import Failure, ProgramError, Site, call_site
from rootlace.program.prefix import PrefixMatcher
from rootlace.program.transcript import Conversation, Transcript
from rootlace.program.variables import Constant, Generation, Operation, Readable, Selection
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import Cancelled, InvalidRequest, RootlaceError

if TYPE_CHECKING:
    from rootlace.program.run import ProgramRun


class _Quoting(Operation):
    """An append that quotes other branches."""

    __slots__ = ("sources",)

    def __init__(self, branch: Branch, site: Site, sources: Sequence[Branch]) -> None:
        super().__init__(branch, site, "join()")
        self.sources = tuple(sources)


class _Closing(Completion):
    """A close or cancel: nobody cares whether it failed."""

    __slots__ = ()

    def __call__(self, event: protocol.Event) -> None:
        self.finish()


class Branch:
    """Turns expressions into operations as they are appended; never waits for the server.

    Used by one thread (or loop) at a time, besides the I/O thread that reports events.
    """

    def __init__(self, run: ProgramRun, parent: Branch | None = None) -> None:
        self.run = run
        self.id = run.connection.next_branch()
        self.parent = parent
        self.transcript: Transcript = Transcript(parent.transcript if parent else None)
        self.conversation: Conversation = parent.conversation.copy() if parent else Conversation()
        self.variables: dict[str, Readable] = dict(parent.variables) if parent else {}
        self.failure: Failure | None = None
        self.last: Operation | None = None
        self.closed = ""
        self._abandoned = False
        self._children = 0
        self._quoting: list[_Quoting] = []
        self._parts: list[protocol.Part] = []
        self._matcher: PrefixMatcher | None = None
        self._opened = False
        run.adopt(self)
        if parent is not None:
            parent.ensure_open()
            parent._children += 1
            self._open(parent.id)
        elif run.prefix is not None:
            self._matcher = PrefixMatcher(run.prefix)

    # ------------------------------------------------------------ growing

    def append(self, expression: Appendable) -> None:
        """Send what `expression` stands for. Raises at once only for what no server could do."""
        self._check_open()
        for item in items(expression):
            if isinstance(item, str):
                self._add_text(protocol.Text(item))
            elif isinstance(item, Gen):
                self._generate(item)
            elif isinstance(item, Select):
                self._select(item)
            elif isinstance(item, RoleBegin):
                self._begin_role(item)
            elif isinstance(item, RoleEnd):
                self._end_role(item)
            elif isinstance(item, TokenIds):
                if item.ids:
                    self._parts.append(protocol.Tokens(item.ids))
            else:
                raise TypeError(f"{item!r} can only be appended while a program is traced")
        self._send_parts()
        if self.run.stream:
            self.run.signal.fire()

    def quote(self, sources: Sequence[Branch]) -> None:
        """Append what `sources` have gained since they were opened, without waiting for it."""
        self._check_open()
        self.ensure_open()
        operation = _Quoting(self, call_site(), sources)
        parts = tuple(protocol.Quote(source.id) for source in sources)
        for source in sources:
            source._quoting.append(operation)
            self.transcript.append(source.transcript.excerpt(source.transcript.start))
        self._issue(protocol.Append(self._next(), self.id, parts), operation)

    def fork(self) -> Branch:
        """A branch that starts where this one stands."""
        self._check_open()
        return Branch(self.run, self)

    def set_variable(self, name: str, value: object) -> None:
        self.variables[name] = Constant(value)

    def _add_text(self, part: protocol.Text) -> None:
        if part.text:
            self._parts.append(part)
            self.transcript.append(part.text)

    def _generate(self, expression: Gen) -> None:
        site = expression.site
        try:
            asked = sampling.resolve(self.run.defaults, expression.options)
        except RootlaceError as error:
            raise ProgramError(site, expression.what, error) from error
        self._send_parts()
        self.ensure_open()
        operation = Generation(self, site, expression.what, asked.params, asked.type)
        self._record(expression.name, operation)
        op = protocol.Generate(
            op=self._next(),
            branch=self.id,
            name=expression.name or "",
            params=asked.params,
            constraint=asked.constraint,
            stream=self.run.stream,
        )
        self._issue(op, operation)

    def _select(self, expression: Select) -> None:
        self._send_parts()
        self.ensure_open()
        operation = Selection(self, expression.site, expression.what, expression.choices)
        self._record(expression.name, operation)
        op = protocol.Select(
            op=self._next(),
            branch=self.id,
            choices=expression.choices,
            name=expression.name or "",
            method=expression.method,
            temperature=expression.temperature,
        )
        self._issue(op, operation)

    def _record(self, name: str | None, operation: Generation | Selection) -> None:
        self.transcript.append(operation)
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
        for text in texts:
            self._add_text(text)
        talk.opened = True
        talk.role = expression.role
        talk.role_start = len(self.transcript)

    def _end_role(self, expression: RoleEnd) -> None:
        talk = self.conversation
        if talk.role != expression.role:
            reason = f"the message that is open is {talk.role or 'none'}"
            error = InvalidRequest(f"a {expression.role} message ends, but {reason}")
            raise ProgramError(expression.site, f"{expression.role}_end()", error) from error
        talk.messages.append((talk.role, self.transcript.excerpt(talk.role_start)))
        talk.role = None
        for text in chat_format.end(self.run.chat, expression.role):
            self._add_text(text)

    # ------------------------------------------------------------ sending

    def ensure_open(self) -> None:
        """Open it on the server, if that waited for the branch's first text."""
        if not self._opened:
            held = self._matcher.give_up() if self._matcher else ()
            self._matcher = None
            self._open(None)
            if held:
                self._append(held)

    def _open(self, parent: int | None) -> None:
        self._opened = True
        program = self.run.program if parent is None else ""
        op = protocol.Open(self._next(), self.id, parent=parent, program=program)
        self._issue(op, Operation(self, call_site(), "opening a branch"))

    def _send_parts(self) -> None:
        parts, self._parts = tuple(self._parts), []
        if not parts:
            return
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

    def _append(self, parts: tuple[protocol.Part, ...]) -> None:
        op = protocol.Append(self._next(), self.id, parts)
        self._issue(op, Operation(self, call_site(), "appending text"))

    def _next(self) -> int:
        return self.run.connection.next_op()

    def _issue(self, op: protocol.Op, operation: Operation) -> None:
        self.last = operation
        try:
            self.run.connection.send(op, operation)
        except InvalidRequest as error:
            self._refuse(operation, error)
        if self.run.cancelled:  # the canceller may not have seen this branch's latest operation
            self.cancel()

    def _refuse(self, operation: Operation, error: InvalidRequest) -> NoReturn:
        """End `operation`, which cannot be sent, as the server ends one that fails."""
        operation.failure = failure = self.failed(operation, error)
        operation.finish()
        # What follows would continue a text without this operation: the branch is broken.
        self.run.connection.send(protocol.Cancel(self._next(), self.id), _Closing())
        raise failure.exception()

    def _check_open(self) -> None:
        if self.run.cancelled:
            raise Cancelled("the program was cancelled")
        if self.closed:
            raise InvalidRequest(f"{self.closed}: its state can be read, but not appended to")

    # ------------------------------------------------------------ what the I/O thread reports

    def failed(self, operation: Operation, error: RootlaceError) -> Failure:
        """The failure that readers of `operation` get to see: the first one, whose it may be."""
        if self.failure is None:
            self.failure = self._inherited(operation, error)
        if self.failure is None:
            self.failure = Failure(operation.site, operation.what, error)
            if not self._abandoned:
                self.run.note(self.failure)
        return self.failure

    def _inherited(self, operation: Operation, error: RootlaceError) -> Failure | None:
        if isinstance(operation, _Quoting):
            for source in operation.sources:
                if source.failure is not None:
                    return source.failure
        if isinstance(error, Cancelled) and self.parent is not None:
            return self.parent.failure
        return None

    def news(self) -> None:
        if self.run.stream:
            self.run.signal.fire()

    # ------------------------------------------------------------ the end

    def close(self, why: str = "the program has ended") -> None:
        """Give the branch back once its operations are over. What it said stays readable."""
        if self.closed:
            return
        self.closed = why
        self.run.release(self, self._abandoned)
        if not self._opened:
            return
        # A branch must live until those that quote it have got its text.
        for operation in self._quoting:
            if not operation.done:
                operation.add_callback(self._send_close)
                return
        self._send_close()

    def cancel(self) -> None:
        """Abort what runs and what is queued. From any thread."""
        if self._opened and self.last is not None and not self.last.done:
            self.run.connection.send(protocol.Cancel(self._next(), self.id), _Closing())

    def drop(self) -> None:
        """Nobody holds the state any more (called by the garbage collector)."""
        if not self.closed and not self.run.ended.done:
            self._abandoned = True
            if not self._children and not self._quoting:
                self.cancel()
            self.close("this fork was dropped")

    def _send_close(self) -> None:
        for operation in self._quoting:
            if not operation.done:
                operation.add_callback(self._send_close)
                return
        self.run.connection.send(protocol.Close(self._next(), self.id), _Closing())
