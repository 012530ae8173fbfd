"""States that have ended, apart from any runtime: as JSON, as pickles, and read again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

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
from rootlace.language.transcript import Marked, StateText, text_of
from rootlace.language.variables import Constant, Gathered, Pending, Readable, unknown
from rootlace.wire.errors import InvalidRequest, UnreadableValue
from rootlace.wire.protocol import Image

VERSION = 1

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class SavedValue:
    """What a `gen` or `select` gave: `texts` (one, or a list), read as `type` if that is not str,
    and its meta information."""

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
            name = types.name_of(self.type)
            raise UnreadableValue(f"the saved text cannot be read as {name}: {error}") from error

    def written(self) -> Any:
        return self.texts

    def meta(self) -> Any:
        return self.info

    def saved(self) -> SavedValue:
        return self


@dataclass(frozen=True)
class Saved:
    """All that a state holds. `pieces` are its text; `model` says whose token ids are in it."""

    model: str
    pieces: tuple[str, ...]
    variables: Mapping[str, Readable]
    value: Any = None

    def to_json(self) -> str:
        """Raises InvalidRequest, naming the variable whose value JSON cannot hold."""
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
    """What `to_json` wrote; `kinds` are the types of variables. Raises InvalidRequest."""
    try:
        record = msgspec.json.decode(text)
        if not isinstance(record, dict) or record.get("rootlace") != VERSION:
            raise InvalidRequest(f"this is no saved state of version {VERSION}")
        variables = {
            name: _variable(variable, kinds.get(name, Any))
            for name, variable in record["variables"].items()
        }
        pieces = tuple(map(_read_piece, msgspec.convert(record["text"], list[Any])))
        return Saved(msgspec.convert(record["model"], str), pieces, variables, record["value"])
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"this is no saved state: {error!r}") from error


def _encoded(what: str, value: Any) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
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


def _read_piece(given: Any) -> str:
    if isinstance(given, str):
        return given
    if "template" in given:
        text = msgspec.convert(given["template"], str)
        return Marked(text, TemplateText(text))
    if "image" in given:
        return Marked("", ImagePart(msgspec.convert(given["image"], Image), NOWHERE))
    item: Appendable
    if "begin" in given:
        item = RoleBegin(msgspec.convert(given["begin"], str), NOWHERE)
    elif "end" in given:
        item = RoleEnd(msgspec.convert(given["end"], str), NOWHERE)
    else:
        item = TokenIds(msgspec.convert(given["ids"], tuple[_TokenId, ...]), NOWHERE)
    return Marked(msgspec.convert(given["text"], str), item)


class SavedReader:
    """Reads a saved state; see `rootlace.language.state.Reader`."""

    streams = False

    def __init__(self, saved: Saved, variables: Mapping[str, Readable]) -> None:
        self._pieces = saved.pieces
        self._variables = variables

    def find(self, name: str) -> Readable:
        found = self._variables.get(name)
        if found is None:
            raise unknown(name, self._variables)
        return found

    def pending(self) -> Iterable[Pending]:
        return ()

    def wait_for(self, pending: Iterable[Pending]) -> None:
        pass

    async def wait_for_async(self, pending: Iterable[Pending]) -> None:
        pass

    wait_for_any, wait_for_any_async = wait_for, wait_for_async

    def text(self) -> StateText:
        return StateText(self._pieces)

    def messages(self) -> list[dict[str, str]]:
        return text_of(self._pieces)[1].messages()

    def error(self) -> None:
        return None

    def follow(self, name: str | None) -> Iterator[str]:
        yield str(self.text() if name is None else self.find(name).written())

    async def follow_async(self, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
        for text in self.follow(name):
            meta = None if name is None else self.find(name).meta()
            yield (text, meta) if with_meta else text


class SavedBranch:
    """The branch of a saved state: it can be read, and others can go on from it."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self.variables: dict[str, Readable] = dict(saved.variables)
        self.reader = SavedReader(saved, self.variables)

    def saved(self) -> Saved:
        return Saved(self._saved.model, self._saved.pieces, self.variables)

    def set_variable(self, name: str, value: Any) -> None:
        self.variables[name] = Constant(value)

    def timeline(self) -> NoReturn:
        raise InvalidRequest("a saved state does not say when it did what; trace() it beforehand")

    def _ended(self, *_: object) -> NoReturn:
        raise InvalidRequest("a saved state can be read, but not appended to; run(after=state)")

    append: Any = _ended
    restore: Any = _ended
    position: Any = _ended
    name_from: Any = _ended
    fork: Any = _ended
    join: Any = _ended
    scope: Any = _ended
    take_offer: Any = _ended
    called: Any = _ended
    mark: Any = _ended
    go_back: Any = _ended
    become: Any = _ended
    drop: Any = _ended
