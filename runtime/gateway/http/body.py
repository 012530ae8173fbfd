"""JSON bodies as typed structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import check_refused
from rootlace.runtime.gateway.http.suggestions import LONGEST, field_suggestion
from rootlace.wire.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies: a misspelt field is an error."""


MANY = msgspec.Meta(max_length=2**14)
"""For a list of messages: each costs time before anything can be refused by its length."""

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_FIELD = re.compile(r"(missing required|contains unknown) field `([^`]*)`")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`.

    Raises InvalidRequest when it is not JSON and InvalidParameter when a field is unknown, missing,
    refused or of a wrong type; a body beyond the application's bound raises aiohttp's 413.
    """
    return decode_body(await request.read(), kind)


def decode_body(raw: bytes | memoryview, kind: type[T]) -> T:
    """The same for a body that has been read."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    check_refused(body)
    return body


def convert(value: object, kind: type[T], param: str) -> T:
    """`value` (already decoded JSON) as `kind`; errors name the path below `param`."""
    try:
        body = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind, param) from None
    check_refused(body, param)
    return body


def as_parameter(message: str, kind: type, below: str = "") -> InvalidRequest:
    """What msgspec says of a wrong value of `kind`, as an error that names the field."""
    field = _FIELD.search(message)
    if field and len(field[2]) > LONGEST:
        message = message.replace(field[2], field[2][: LONGEST - 3] + "...")
        field = _FIELD.search(message)
    at = _PATH.search(message)
    path = at[1] if at else ""
    names = (below, path.replace("[...]", ""), field[2] if field else "")
    param = ".".join(name for name in names if name)
    if not param:
        return InvalidRequest(message)
    reason = _PATH.sub("", message)
    hint = ""
    if field and field[1] == "contains unknown":
        hint = field_suggestion(kind, path, field[2])
    return InvalidParameter(param, f"{param}: {reason[0].lower()}{reason[1:]}{hint}")
