"""A branch of a running program: what it has appended, as text and as operations."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rootlace.language import sampling
from rootlace.language.expressions import (
    Appendable,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    TemplateText,
    TokenIds,
    items,
)
from rootlace.language.failures import ProgramError
from rootlace.language.saved import Saved
from rootlace.language.tool_calls import Offer
from rootlace.language.tools import Tools
from rootlace.language.transcript import Conversation, Marked, StateText, Transcript
from rootlace.language.variables import Constant, Gathered, Readable
from rootlace.program.operations import Generation, Selection
from rootlace.program.reader import BranchReader
from rootlace.program.remote_branch import RemoteBranch
from rootlace.program.run import ProgramRun
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest, RootlaceError
from rootlace.wire.tool_format import write_list


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
        self._start = self.transcript.start
        self._parts: list[protocol.Part] = []
        self._caller: Branch | None = None
        self._became: Branch | None = None
        self._offer: Offer | None = parent._offer if parent else None

    def _reader(self) -> BranchReader:
        return BranchReader(
            self.run, self.remote, self.transcript, self.conversation, self.variables
        )

    def append(self, expression: Appendable) -> None:
        """Send what `expression` stands for. Raises at once only for what no server could do."""
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
            listing = write_list(self.run.chat.tools, [each.definition() for each in item])
            for text, special in listing:
                self._append_one(TemplateText(text) if special else text)
        elif isinstance(item, TemplateText):
            self._add_text(protocol.Text(item.text, special=True), Marked(item.text, item))
        elif isinstance(item, TokenIds):
            self._add_tokens(Marked("", item), item)
        else:
            raise TypeError(f"{item!r} can only be appended while a program is traced")

    def fork(self, size: int, adapter: str | None = None) -> list[Branch]:
        """`size` branches that start where this one stands, with its adapter or another one."""
        self.remote.check_open()
        return [self._fork(adapter) for _ in range(size)]

    def _fork(self, adapter: str | None) -> Branch:
        fork = Branch(self.run, self, adapter)
        # A fork that the program lets go of is given back, whatever it still does.
        weakref.finalize(fork, fork.remote.drop).atexit = False
        return fork

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
            branch._offer = other._offer
            branch._became = other  # whose end would give the branch back
            branch.reader = branch._reader()
            branch = branch._caller
        self.variables.clear()
        self.variables.update(other.variables)
        left.abandon()

    def drop(self) -> None:
        self.remote.abandon()

    def take_offer(self) -> Offer | None:
        offer = self._offer
        self._make_offer(None)
        return offer

    def _make_offer(self, offer: Offer | None) -> None:
        branch: Branch | None = self
        while branch is not None:
            branch._offer = offer
            branch = branch._caller

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
        self._restore(saved.pieces, saved.model)
        self.variables.update(saved.variables)

    def _restore(self, pieces: Iterable[str], model: str) -> None:
        """Append `pieces`, which a state of `model` held."""
        same = model == self.run.connection.model.path
        for piece in pieces:
            item = piece.item if isinstance(piece, Marked) else piece
            if isinstance(item, TokenIds) and same:
                assert isinstance(piece, Marked)
                self._add_tokens(piece, item)
            elif isinstance(item, TokenIds) and not piece:
                raise InvalidRequest(f"the state holds token ids of another model, {model}")
            elif isinstance(item, (RoleBegin, RoleEnd, TemplateText)):
                self._append_one(item)
            else:
                self._add_text(protocol.Text(str(piece)), str(piece))
        self._send_parts()

    def _add_string(self, text: str) -> None:
        if isinstance(text, StateText) and text.has_roles and self.conversation.role is None:
            self._restore(text.pieces, self.run.connection.model.path)
        else:
            self._add_text(protocol.Text(str(text)), text)

    def _add_text(self, part: protocol.Text, piece: str) -> None:
        if part.text:
            self._parts.append(part)
            self.transcript.append(piece)

    def _add_tokens(self, piece: Marked, item: TokenIds) -> None:
        if item.ids:
            self._parts.append(protocol.Tokens(item.ids))
            self.transcript.append(piece)

    def _generate(self, expression: Gen) -> None:
        site = expression.site
        try:
            form = self.run.chat.tools
            asked = sampling.resolve(self.defaults, expression.options, form=form)
            handling = self.run.in_time(asked.handling)
            params, spend = self.run.bounded(asked.params)
        except RootlaceError as error:
            raise ProgramError(site, expression.what, error) from error
        self._send_parts()
        self.remote.ensure_open()
        operation = Generation(self.remote, site, expression.what, params, asked.type, spend)
        self._record(expression.name, operation)
        tools = expression.options.get("tools", self.defaults.get("tools"))
        if tools is not None and asked.constraint is not None:  # with "none", nothing is called
            self._make_offer(Offer(tools, operation, form))
        op = protocol.Generate(
            op=self.remote.next_op(),
            branch=self.remote.id,
            name=expression.name or "",
            params=params,
            constraint=asked.constraint,
            stream=self.run.stream,
            cache_report=asked.cache_report,
            handling=handling,
        )
        self.remote.issue(op, operation)

    def _select(self, expression: Select) -> None:
        try:
            handling = self.run.in_time(sampling.handling_of(self.defaults, {}))
        except DeadlineExceeded as error:
            raise ProgramError(expression.site, expression.what, error) from error
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
            handling=handling,
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
            self.remote.append(parts)
