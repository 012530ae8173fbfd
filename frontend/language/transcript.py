"""Branches of states, their transcripts, and saved states, also as JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, Protocol, Self

import msgspec

from rootlace import types
from rootlace.language.expressions import (
    Appendable,
    ImagePart,
    RoleBegin,
    RoleEnd,
    TemplateText,
    TokenIds,
)
from rootlace.language.failures import NOWHERE
from rootlace.language.tools import Offer, ToolCall
from rootlace.language.variables import Constant, Gathered, Pending, Readable, unknown
from rootlace.timeline import Timeline
from rootlace.types.msgspec_types import name_of
from rootlace.wire.errors import InvalidRequest, UnreadableValue
from rootlace.wire.protocol import Image


class Marked(str):
    """Text of an `item`: a role's beginning or end, other template text, or token ids. Token ids
    are those of generated text; appended ids have no text. A branch of the same model that appends
    the item has the same tokens."""

    __slots__ = ("item",)
    item: Appendable

    def __new__(cls, text: str, item: Appendable = "") -> Marked:
        marked = super().__new__(cls, text)
        marked.item = item
        return marked

    @property
    def is_role(self) -> bool:
        return isinstance(self.item, (RoleBegin, RoleEnd))


class StateText(str):
    """Text of a state, with its pieces. Appended unchanged, outside of any message, its messages
    stay messages; joined with other text it is an ordinary string."""

    __slots__ = ("pieces",)
    pieces: tuple[str, ...]

    def __new__(cls, pieces: Iterable[str]) -> StateText:
        known = tuple(pieces)
        text = super().__new__(cls, "".join(known))
        text.pieces = known
        return text

    def __reduce__(self) -> Any:
        return type(self), (self.pieces,)

    @property
    def has_roles(self) -> bool:
        return any(isinstance(piece, Marked) and piece.is_role for piece in self.pieces)


class Written(Readable, Protocol):
    """Value in a transcript."""

    def text(self) -> str: ...

    def pieces(self) -> Iterable[str]:
        """Return the texts of the value, `Marked` if they represent an item."""


Piece = str | Written


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Pieces `start` to `end` of a transcript: a variable scope, or the text of a join."""

    transcript: Transcript
    start: int
    end: int

    def requires(self) -> Iterable[Pending]:
        for piece in self.transcript.slice(self.start, self.end):
            if not isinstance(piece, str):
                yield from piece.requires()

    def pieces(self) -> Iterator[str]:
        for piece in self.transcript.slice(self.start, self.end):
            if isinstance(piece, str):
                yield piece
            else:
                yield from piece.pieces()

    def get(self) -> str:
        pieces = self.transcript.slice(self.start, self.end)
        return "".join(piece if isinstance(piece, str) else piece.text() for piece in pieces)

    text = written = get

    def meta(self) -> Any:
        return None

    def saved(self) -> Readable:
        return Constant(self.get())


class Transcript:
    """Append-only sequence of pieces. A fork refers to its parent's pieces, without copying."""

    __slots__ = ("_base", "_pieces", "_start")

    def __init__(self, base: Transcript | None = None) -> None:
        self._base = base
        self._start = len(base) if base is not None else 0
        self._pieces: list[Piece] = []

    def __len__(self) -> int:
        return self._start + len(self._pieces)

    @property
    def start(self) -> int:
        """Return the index of the first piece that is not the parent's."""
        return self._start

    def append(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def slice(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces `start` to `end` (exclusive), ancestors' pieces included."""
        parts: list[list[Piece]] = []
        node: Transcript | None = self
        while node is not None and end > start:
            if end > node._start:
                parts.append(node._pieces[max(start - node._start, 0) : end - node._start])
                end = node._start
            node = node._base
        for part in reversed(parts):
            yield from part

    def excerpt(self, start: int = 0) -> Excerpt:
        """Return the pieces from `start` to the present end."""
        return Excerpt(self, start, len(self))


@dataclass(slots=True)
class Conversation:
    """Messages of a transcript, as ranges of its pieces. `role` is the open message's. `offer` has
    the tools of the latest generation; None once it was taken."""

    _messages: list[tuple[str, Excerpt]] = field(default_factory=list)
    opened: bool = False
    role: str | None = None
    start: int = 0
    """Index of the open message's first piece."""
    offer: Offer | None = None

    def copy(self) -> Conversation:
        return Conversation(list(self._messages), self.opened, self.role, self.start, self.offer)

    def begin(self, role: str, transcript: Transcript) -> None:
        """Begin a message at the end of `transcript`."""
        self.opened = True
        self.role = role
        self.start = len(transcript)

    def end(self, role: str, transcript: Transcript) -> None:
        self._messages.append((role, transcript.excerpt(self.start)))
        self.role = None

    def messages(self) -> list[dict[str, str]]:
        """Return the finished messages, as {"role", "content"}."""
        return [
            {"role": role, "content": content.get().lstrip()} for role, content in self._messages
        ]


def text_of(pieces: Sequence[str]) -> tuple[Transcript, Conversation]:
    """Return `pieces` as a transcript, and its messages."""
    transcript, conversation = Transcript(), Conversation()
    for piece in pieces:
        item = piece.item if isinstance(piece, Marked) else ""
        if isinstance(item, RoleEnd):
            conversation.end(item.role, transcript)
        transcript.append(piece)
        if isinstance(item, RoleBegin):
            conversation.begin(item.role, transcript)
    return transcript, conversation


# Saved --------------------------------------------------------------------------------------------


VERSION = 1

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class SavedValue:
    """Result of a `gen` or `select`: `texts` (one, or a list) and the meta information. `type`
    other than str parses the texts."""

    texts: Any
    info: Any = None
    type: Any = str

    def requires(self) -> Iterable[Pending]:
        return ()

    def get(self) -> Any:
        if self.type is str:
            return self.texts
        if isinstance(self.texts, str):
            return self._parsed(self.texts)
        return [self._parsed(text) for text in self.texts]

    def _parsed(self, text: str) -> Any:
        try:
            return types.parse_as(self.type, text)
        except ValueError as error:
            name = name_of(self.type)
            raise UnreadableValue(f"the saved text cannot be read as {name}: {error}") from error

    def written(self) -> Any:
        return self.texts

    def meta(self) -> Any:
        return self.info

    def saved(self) -> SavedValue:
        return self


@dataclass(frozen=True)
class Saved:
    """Contents of a state. `pieces` are its text; `model` is the model of the token ids."""

    model: str
    pieces: tuple[str, ...]
    variables: Mapping[str, Readable]
    value: Any = None

    def to_json(self) -> str:
        """Encode as JSON. Raises InvalidRequest naming a variable that JSON cannot hold."""
        variables = {}
        for name, variable in self.variables.items():
            variables[name] = _encoded(f"the variable {name!r}", _describe(variable))
        record = {
            "rootlace": VERSION,
            "model": self.model,
            "text": [_piece(piece) for piece in self.pieces],
            "variables": variables,
            "value": _encoded("what the program returned", self.value),
        }
        return msgspec.json.encode(record).decode()


def read_json(text: str | bytes, kinds: Mapping[str, Any]) -> Saved:
    """Read the JSON of `to_json`. `kinds` are the types of variables; "return" names the program's
    returned value. Raises InvalidRequest."""
    try:
        record = msgspec.json.decode(text)
        if not isinstance(record, dict) or record.get("rootlace") != VERSION:
            raise InvalidRequest(f"this is no saved state of version {VERSION}")
        variables = {
            name: _variable(variable, kinds.get(name, Any))
            for name, variable in record["variables"].items()
        }
        pieces = tuple(map(_read_piece, msgspec.convert(record["text"], list[Any])))
        value = returned(record["value"], kinds)
        return Saved(msgspec.convert(record["model"], str), pieces, variables, value)
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"this is no saved state: {error!r}") from error


def returned(value: Any, kinds: Mapping[str, Any]) -> Any:
    """Return the program's returned value, converted from JSON. Raises InvalidRequest if its type
    does not match."""
    if "return" not in kinds:
        return value
    try:
        return types.parse_as(kinds["return"], msgspec.json.encode(value).decode())
    except ValueError as error:
        name = name_of(kinds["return"])
        raise InvalidRequest(f"what the program returned is no {name}: {error}") from error


def _encoded(what: str, value: Any) -> msgspec.Raw:
    try:
        return msgspec.Raw(types.encoded(value))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from None


def _describe(variable: Readable) -> Any:
    if isinstance(variable, SavedValue):
        typed = {} if variable.type is str else {"typed": True}
        return {"text": variable.texts, "meta": variable.info, **typed}
    if isinstance(variable, Gathered):
        return {"all": [_describe(part) for part in variable.parts]}
    return {"value": variable.get()}


def _variable(described: Any, kind: Any) -> Readable:
    if "all" in described:
        return Gathered([_variable(part, kind) for part in described["all"]])
    if "text" in described:
        typed = described.get("typed", False)
        texts = msgspec.convert(described["text"], str | list[str])
        return SavedValue(texts, described["meta"], kind if typed else str)
    return Constant(described["value"])


def _piece(piece: str) -> Any:
    item = piece.item if isinstance(piece, Marked) else None
    if isinstance(item, RoleBegin):
        return {"begin": item.role, "text": str(piece)}
    if isinstance(item, RoleEnd):
        return {"end": item.role, "text": str(piece)}
    if isinstance(item, TemplateText):
        return {"template": item.text}
    if isinstance(item, TokenIds):
        return {"ids": item.ids, "text": str(piece)}
    if isinstance(item, ImagePart):
        return {"image": item.part}
    return str(piece)


def _read_piece(piece: Any) -> str:
    if isinstance(piece, str):
        return piece
    if "template" in piece:
        text = msgspec.convert(piece["template"], str)
        return Marked(text, TemplateText(text))
    if "image" in piece:
        return Marked("", ImagePart(msgspec.convert(piece["image"], Image), NOWHERE))
    item: Appendable
    if "begin" in piece:
        item = RoleBegin(msgspec.convert(piece["begin"], str), NOWHERE)
    elif "end" in piece:
        item = RoleEnd(msgspec.convert(piece["end"], str), NOWHERE)
    else:
        item = TokenIds(msgspec.convert(piece["ids"], tuple[_TokenId, ...]), NOWHERE)
    return Marked(msgspec.convert(piece["text"], str), item)


# Branches -----------------------------------------------------------------------------------------
#
# Interface behind a state: a branch takes appended expressions and returns results.
#
# There are two interpreters of a program. `rootlace.program` runs it: appending sends operations to
# a runtime. `rootlace.trace` finds its graph: appending records nodes, and reading gives symbols.
# The branch of a saved state can only be read.


class Branch(Protocol):
    """Interpreter of a program's operations, in order, and source of its results. `wait_for` and
    `wait_for_async` return once all given operations are over."""

    variables: dict[str, Readable]
    seed_offset: int
    """Offset added to the seeds of generations: alternative continuations draw differently."""

    @property
    def streams(self) -> bool:
        """Return whether text arrives while it is generated."""

    def find(self, name: str) -> Readable:
        """Return the variable `name`. Raises UnknownVariable if the program has not used it."""

    def pending(self) -> Iterable[Pending]:
        """Return the operations that `text`, `messages` and `error` must wait for."""

    def wait_for(self, pending: Iterable[Pending]) -> None: ...

    async def wait_for_async(self, pending: Iterable[Pending]) -> None: ...

    def wait_for_any(self, pending: Sequence[Pending]) -> None:
        """Wait until at least one of `pending` is over."""

    async def wait_for_any_async(self, pending: Sequence[Pending]) -> None: ...

    def text(self) -> str: ...

    def messages(self) -> list[dict[str, str]]: ...

    def error(self) -> BaseException | None: ...

    def check_end(self) -> None:
        """Raise the error of a failed run. A caller outside the program waits for the run's end."""

    def follow(self, name: str | None) -> Generator[str, None, None]:
        """Yield the text of the branch, or of the variable `name`, as it is generated."""

    def follow_async(self, name: str | None, with_meta: bool) -> AsyncGenerator[Any, None]:
        """Yield `follow`'s text on an event loop; `with_meta`: pairs (text, meta information)."""

    def append(self, expression: Appendable) -> None: ...

    def set_variable(self, name: str, value: Any) -> None: ...

    def position(self) -> int:
        """Return the end of the branch so far, for `name_from`."""

    def name_from(self, position: int, name: str) -> None:
        """Make the text appended since `position` the variable `name`."""

    def fork(self, size: int, adapter: str | None = None) -> Sequence[Self]:
        """Fork the branch, with its adapter (None) or another one."""

    def take_offer(self) -> Offer | None:
        """Return the tools of the latest `gen` that may have called some; None once taken."""

    def called(self, call: ToolCall) -> None:
        """Record a tool's call that has just returned its result."""

    def timeline(self) -> Timeline:
        """Return the timeline of the whole run so far."""

    def mark(self) -> Self:
        """Return a branch that stays at the present end."""

    def go_back(self, mark: Self) -> None:
        """Go on from `mark`, which stays usable. Later operations no longer count as failed."""

    def become(self, other: Self) -> None:
        """Go on from `other`, with its text and variables; `other` must not be used any more. The
        abandoned operations are cancelled."""

    def drop(self) -> None:
        """Cancel the branch, and forget its failures."""

    def scope(self, name: str, defaults: Mapping[str, Any]) -> Self:
        """Return this branch for a called program `name`, with its own variables. `defaults`
        override the caller's sampling options."""

    def saved(self) -> Saved:
        """Return the contents of the branch; all operations must be over."""

    def restore(self, saved: Saved) -> None:
        """Append the contents of a saved state."""

    def join(self, forks: Sequence[Self], mode: str) -> None:
        """End `forks`, and bring back their variables ("gather_variable") or their texts."""


class SettledBranch:
    """`Branch` without pending operations."""

    streams = False
    seed_offset = 0

    def pending(self) -> Iterable[Pending]:
        return ()

    def wait_for(self, pending: Iterable[Pending]) -> None:
        pass

    async def wait_for_async(self, pending: Iterable[Pending]) -> None:
        pass

    wait_for_any, wait_for_any_async = wait_for, wait_for_async

    def error(self) -> None:
        return None

    check_end = error


class SavedBranch(SettledBranch):
    """Branch of a saved state: can be read, and other runs can continue from it."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self.variables: dict[str, Readable] = dict(saved.variables)

    def saved(self) -> Saved:
        return Saved(self._saved.model, self._saved.pieces, self.variables)

    def find(self, name: str) -> Readable:
        variable = self.variables.get(name)
        if variable is None:
            raise unknown(name, self.variables)
        return variable

    def text(self) -> StateText:
        return StateText(self._saved.pieces)

    def messages(self) -> list[dict[str, str]]:
        return text_of(self._saved.pieces)[1].messages()

    def follow(self, name: str | None) -> Generator[str, None, None]:
        yield str(self.text() if name is None else self.find(name).written())

    async def follow_async(self, name: str | None, with_meta: bool) -> AsyncGenerator[Any, None]:
        for text in self.follow(name):
            meta = None if name is None else self.find(name).meta()
            yield (text, meta) if with_meta else text

    def set_variable(self, name: str, value: Any) -> None:
        self.variables[name] = Constant(value)

    def timeline(self) -> NoReturn:
        raise InvalidRequest("a saved state does not say when it did what; trace() it beforehand")

    def _ended(self, *_: object, **__: object) -> NoReturn:
        raise InvalidRequest("a saved state can be read, but not appended to; run(after=state)")

    append = restore = position = name_from = fork = join = scope = _ended
    take_offer = called = mark = go_back = become = drop = _ended
