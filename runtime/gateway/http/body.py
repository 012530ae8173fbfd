"""JSON bodies as typed structs, with errors that name the field."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import check_refused
from rootlace.runtime.gateway.http.json_weight import CONTAINER, weight_beyond
from rootlace.runtime.gateway.http.receiving import RECEIVING
from rootlace.runtime.gateway.http.suggestions import (
    LONGEST,
    choices_at,
    field_suggestion,
)
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies: a misspelt field is an error."""


_MOST = 2**14
"""Messages: each costs time before anything can be refused by its length."""
MANY = msgspec.Meta(max_length=_MOST)
SOME = msgspec.Meta(min_length=1, max_length=_MOST)

LARGE_BYTES = 2**20
"""A larger body is decoded in a thread."""
WEIGHED_BYTES = 2**16
"""In a larger one, what its values weigh is looked at before they are made."""
MAX_WEIGHT = 1_100_000
"""Decoding keeps the interpreter from everybody else: 35 ns for each of these."""

_RAW = web.RequestKey("raw", bytes)
BODY_SECONDS = 120.0
"""A body that has not come by then holds its connection no longer."""

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_FIELD = re.compile(r"(missing required|contains unknown) field `([^`]*)`")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`.

    Raises InvalidRequest when it is not JSON, InvalidParameter when a field is unknown, missing,
    refused or of a wrong type, and what `raw_body` raises; a body beyond the application's bound
    raises aiohttp's 413.
    """
    return await decode_anywhere(await raw_body(request), kind)


async def raw_body(request: web.Request) -> bytes:
    """The body as it was sent. Raises DeadlineExceeded for one that comes too slowly, and
    Overloaded where too much of others' is being received."""
    if _RAW not in request:
        with request.app[RECEIVING].body() as take:
            async with in_time(BODY_SECONDS):
                request[_RAW] = await _received(request, take)
    return request[_RAW]


async def _received(request: web.Request, take: Callable[[int], None]) -> bytes:
    """As `request.read` does; `take` is told how many bytes come."""
    body = bytearray()
    while piece := await request.content.readany():
        if len(body) + len(piece) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size)
        take(len(piece))
        body += piece
    return bytes(body)


@asynccontextmanager
async def in_time(seconds: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded where the block, which reads a body, takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not come within {seconds:g} s") from None


async def decode_anywhere(raw: bytes | memoryview, kind: type[T]) -> T:
    """`decode_body` here or, for a large body, in a thread."""
    if len(raw) <= LARGE_BYTES:
        return decode_body(raw, kind)
    return await asyncio.to_thread(decode_body, raw, kind)


def decode_body(raw: bytes | memoryview, kind: type[T]) -> T:
    """The same for a body that has been read."""
    if len(raw) > WEIGHED_BYTES and weight_beyond(raw, MAX_WEIGHT):
        raise InvalidRequest(
            f"the body holds more than {MAX_WEIGHT} values (a string counts two, an array, an"
            f" object or a member of one {CONTAINER})"
        )
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    check_refused(body)
    names = one_of(kind)
    if names and sum(getattr(body, name) is not None for name in names) != 1:
        raise InvalidParameter(names[0], f"give either {' or '.join(names)}")
    return body


def one_of(kind: Any) -> tuple[str, ...]:
    """The fields of a body of which there has to be one, and one alone; it says so itself."""
    names: tuple[str, ...] = getattr(kind, "one_of", ())
    return names


def convert(value: object, kind: type[T], param: str) -> T:
    """`value` (already decoded JSON) as `kind`; errors name the path below `param`."""
    try:
        body = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind, param) from None
    check_refused(body, param)
    return body


@cache
def _all_names() -> frozenset[str]:
    """The names of the fields of all endpoints' bodies, which are there when one is decoded."""
    kinds, names = [Body], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        names.update(kind.__struct_encode_fields__)
    return frozenset(names)


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
        hint = field_suggestion(kind, path, field[2], _all_names())
    elif reason.startswith(("Invalid enum value", "Invalid value")):
        hint = choices_at(kind, path)
    return InvalidParameter(param, f"{param}: {reason[0].lower()}{reason[1:]}{hint}")
