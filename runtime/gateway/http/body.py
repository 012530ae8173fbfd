"""JSON bodies as typed structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.wire.errors import InvalidRequest

T = TypeVar("T")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies: a misspelt field is an error."""


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_FIELD = re.compile(r"(?:missing required|contains unknown) field `([^`]*)`")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`.

    Raises InvalidRequest when it is not JSON and InvalidParameter when a field is unknown, missing
    or of a wrong type; a body beyond the application's bound raises aiohttp's 413.
    """
    raw = await request.read()
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _as_parameter(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def convert(value: object, kind: type[T], param: str) -> T:
    """`value` (already decoded JSON) as `kind`; errors name the path below `param`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _as_parameter(str(error), param) from None


def _as_parameter(message: str, below: str = "") -> InvalidRequest:
    at = _PATH.search(message)
    field = _FIELD.search(message)
    param = ".".join(
        p for p in (below, at[1].replace("[...]", "") if at else "", field[1] if field else "") if p
    )
    if not param:
        return InvalidRequest(message)
    reason = _PATH.sub("", message)
    return InvalidParameter(param, f"{param}: {reason[0].lower()}{reason[1:]}")
