"""A branch of a running program: what it has appended, as text and as operations."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

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
from rootlace.language.failures import ProgramError
from rootlace.language.variables import Constant, Gathered, Readable
from rootlace.program.operations import Generation, Selection
from rootlace.program.reader import BranchReader
from rootlace.program.remote_branch import RemoteBranch
from rootlace.program.run import ProgramRun
from rootlace.program.transcript import Conversation, Transcript
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import InvalidRequest, RootlaceError


class Branch:
    """Turns expressions into operations as they are appended; never waits for the server."""

    def __init__(
        self, run: ProgramRun, parent: Branch | None = None, adapter: str | None = None
    ) -> None:
        self.run = run
        self.remote: RemoteBranch = RemoteBranch(run, parent.remote if parent else None, adapter)
        self.transcript: Transcript = Transcript(parent.transcript if parent else None)
        self.conversation: Conversation = parent.conversation.copy() if parent else Conversation()
        self.variables: dict[str, Readable] = dict(parent.variables) if parent else {}
        self.defaults: Mapping[str, Any] = parent.defaults if parent else run.defaults
        self.reader = self._reader()
        self._parts: list[protocol.Part] = []
        self._caller: Branch | None = None

    def _reader(self) -> BranchReader:
        return BranchReader(
            self.run, self.remote, self.transcript, self.conversation, self.variables
        )

    def append(self, expression: Appendable) -> None:
        """Send what `expression` stands for. Raises at once only for what no server could do."""
        self.remote.check_open()
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
        self.remote.notify()

    def fork(self, size: int, adapter: str | None = None) -> list[Branch]:
        """`size` branches that start where this one stands, with its adapter or another one."""
        self.remote.check_open()
        return [self._fork(adapter) for _ in range(size)]

    def _fork(self, adapter: str | None) -> Branch:
        fork = Branch(self.run, self, adapter)
        # A fork that the program lets go of is given back, whatever it still does.
        weakref.finalize(fork, fork.remote.drop).atexit = False
        return fork

    def scope(self, name: str, defaults: Mapping[str, Any]) -> Branch:
        inner = copy.copy(self)
        inner.variables = {}
        inner._parts = []
        inner.defaults = {**self.defaults, **defaults}
        inner.reader = inner._reader()
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
        self.remote.quote([fork.remote for fork in forks])
        for fork in forks:
            self.transcript.append(fork.transcript.excerpt(fork.transcript.start))

    def position(self) -> int:
        return len(self.transcript)

    def name_from(self, position: int, name: str) -> None:
        self.variables[name] = self.transcript.excerpt(position)

    def set_variable(self, name: str, value: object) -> None:
        self.variables[name] = Constant(value)

    def _add_text(self, part: protocol.Text) -> None:
        if part.text:
            self._parts.append(part)
            self.transcript.append(part.text)

    def _generate(self, expression: Gen) -> None:
        site = expression.site
        try:
            asked = sampling.resolve(self.defaults, expression.options)
        except RootlaceError as error:
            raise ProgramError(site, expression.what, error) from error
        self._send_parts()
        self.remote.ensure_open()
        operation = Generation(self.remote, site, expression.what, asked.params, asked.type)
        self._record(expression.name, operation)
        op = protocol.Generate(
            op=self.remote.next_op(),
            branch=self.remote.id,
            name=expression.name or "",
            params=asked.params,
            constraint=asked.constraint,
            stream=self.run.stream,
            cache_report=asked.cache_report,
        )
        self.remote.issue(op, operation)

    def _select(self, expression: Select) -> None:
        self._send_parts()
        self.remote.ensure_open()
        operation = Selection(self.remote, expression.site, expression.what, expression.choices)
        self._record(expression.name, operation)
        op = protocol.Select(
            op=self.remote.next_op(),
            branch=self.remote.id,
            choices=expression.choices,
            name=expression.name or "",
            method=expression.method,
            temperature=expression.temperature,
        )
        self.remote.issue(op, operation)

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

    def _send_parts(self) -> None:
        parts, self._parts = tuple(self._parts), []
        if parts:
            self.remote.append(parts)
