"""How a field of a body stands: served, accepted though it changes nothing, or refused.

A field without a mark is served. The marks are metadata of the field's type, so that decoding, the
OpenAPI document and `docs/api.md` say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import Metadata, StructType, type_info

from rootlace.runtime.gateway.http.errors import InvalidParameter


@dataclass(frozen=True)
class Standing:
    """What becomes of a field, and why. A refused field may still have one of the values `unless`,
    which ask for nothing, or be empty or null."""

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


def check_refused(body: msgspec.Struct, below: str = "") -> None:
    """Raises InvalidParameter for a refused field that asks for something."""
    for name, about in _refused(type(body)):
        value = getattr(body, name)
        if value and value not in about.unless:
            param = f"{below}.{name}" if below else name
            raise InvalidParameter(param, f"{name} is not supported: {about.why}")


@cache
def _refused(kind: type[msgspec.Struct]) -> tuple[tuple[str, Standing], ...]:
    info = type_info(kind)
    assert isinstance(info, StructType)
    marks = ((field.name, standing(field)) for field in info.fields)
    return tuple((name, mark) for name, mark in marks if mark and mark.kind == "refused")


def _mark(mark: Standing) -> msgspec.Meta:
    return msgspec.Meta(description=str(mark), extra={"standing": mark})


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
