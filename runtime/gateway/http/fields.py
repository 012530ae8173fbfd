"""How a field of a body stands: served, accepted though it changes nothing, or refused.

A field without a mark is served. The marks are metadata of the field's type, so that decoding, the
OpenAPI document and `docs/api.md` say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import ListType, Metadata, StructType, UnionType, type_info

from rootlace.runtime.gateway.http.errors import InvalidParameter


@dataclass(frozen=True)
class Standing:
    """What becomes of a field, and why. A refused field may still have one of the values `unless`,
    which ask for nothing, or be null, false or an empty text or list."""

    kind: str  # "ignored" or "refused"
    why: str
    unless: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "ignored":
            return f"Accepted, and changes nothing: {self.why}."
        but = f" (accepted: {', '.join(map(_shown, self.unless))})" if self.unless else ""
        return f"Refused: {self.why}{but}."


def ignored(why: str) -> msgspec.Meta:
    """A field that is accepted because it changes nothing here."""
    return _mark(Standing("ignored", why))


def refused(why: str, *unless: Any) -> msgspec.Meta:
    """A field that is known and not served; `why` may say what to use instead."""
    return _mark(Standing("refused", why, unless))


def standing(field: msgspec.inspect.Field) -> Standing | None:
    """The mark of a field; None for one that is served."""
    if isinstance(field.type, Metadata) and field.type.extra:
        found: Standing | None = field.type.extra.get("standing")
        return found
    return None


def is_refused(field: msgspec.inspect.Field) -> bool:
    mark = standing(field)
    return mark is not None and mark.kind == "refused"


def check_refused(body: msgspec.Struct, below: str = "") -> None:
    """Raises InvalidParameter for a refused field that asks for something, in `body` or in what it
    holds; `below` is the path of `body`."""
    for field in _looked_at(type(body)):
        value = getattr(body, field.name)
        # 0 and {} may ask for something: a prompt's log-probabilities, a search of the web.
        if value is None or value is False or value == "" or value == []:
            continue
        param = f"{below}.{field.encode_name}" if below else field.encode_name
        if not is_refused(field):
            for path, struct in _structs(value, param):
                check_refused(struct, path)
        elif (mark := standing(field)) is not None and value not in mark.unless:
            raise InvalidParameter(param, f"{param} is not supported: {mark.why}")


def _structs(value: Any, path: str) -> Iterator[tuple[str, msgspec.Struct]]:
    if isinstance(value, msgspec.Struct):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _structs(item, f"{path}[{index}]")


@cache
def _looked_at(kind: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    """The refused fields, and those that may hold some."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    return tuple(f for f in info.fields if is_refused(f) or _holds_refused(f.type, set()))


def _holds_refused(type_: msgspec.inspect.Type, seen: set[type]) -> bool:
    match type_:
        case Metadata(type=inner) | ListType(item_type=inner):
            return _holds_refused(inner, seen)
        case UnionType(types=types):
            return any(_holds_refused(one, seen) for one in types)
        case StructType(cls=cls, fields=fields) if cls not in seen:
            seen.add(cls)
            return any(is_refused(f) or _holds_refused(f.type, seen) for f in fields)
    return False


def _mark(mark: Standing) -> msgspec.Meta:
    return msgspec.Meta(description=str(mark), extra={"standing": mark})


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
