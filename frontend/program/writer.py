"""Writing to a branch of a run: expressions become operations as they are appended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from rootlace.language.tool_calls import Offer
from rootlace.language.tools import Tools
from rootlace.language.transcript import Conversation, Marked, StateText, Transcript
from rootlace.language.variables import Readable
from rootlace.program.operations import Generation, Selection
from rootlace.program.remote_branch import RemoteBranch
from rootlace.program.run import ProgramRun
from rootlace.wire import chat_format, protocol
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest, RootlaceError
from rootlace.wire.tool_format import write_list

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
