"""JSON bodies as typed structs, with errors that name the field."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import inspect

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import check_refused
from rootlace.runtime.gateway.http.json_weight import CONTAINER, weight_beyond
from rootlace.runtime.gateway.http.receiving import RECEIVING
from rootlace.runtime.gateway.http.suggestions import (
    LONGEST,
    alternatives,
    choices_at,
    field_suggestion,
)
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies: a misspelt field is an error, unless it asks for nothing: its
    value is null or empty, or it is false and its name begins with `return_`."""


class History(Body, forbid_unknown_fields=False):
    """Base of what clients send back of a conversation. Unknown fields are dropped: clients append
    what they were answered, with what they and other servers have added to it."""


_MOST = 2**14
"""Messages: each costs time before anything can be refused by its length."""
MANY = msgspec.Meta(max_length=_MOST)
SOME = msgspec.Meta(min_length=1, max_length=_MOST)

LARGE_BYTES = 2**16
"""A larger body is decoded in a thread, and weighed before its values are made."""
MAX_WEIGHT = 1_100_000
"""Decoding keeps the interpreter from everybody else: 35 ns for each of these."""

_Holder = inspect.StructType | inspect.ListType
_EMPTY = re.compile(rb'null|""|\[\s*\]|\{\s*\}')
_NO_RETURN = re.compile(_EMPTY.pattern + rb"|false")
_SHOWN = 32
"""So many dropped fields are named in the log."""

_RAW = web.RequestKey("raw", bytes)
BODY_SECONDS = 120.0
"""A body that has not come by then holds its connection no longer."""

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")
_WANTS_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_INTEGRAL_PLACES = 16
"""Of a body, at most, that have a number such as 3.0 for an integer; of a list, all are one."""
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


@contextlib.asynccontextmanager
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
    if len(raw) > LARGE_BYTES and weight_beyond(raw, MAX_WEIGHT):
        raise InvalidRequest(
            f"the body holds more than {MAX_WEIGHT} values (a string counts two, an array, an"
            f" object or a member of one {CONTAINER})"
        )
    try:
        try:
            body = _with_integers(raw, kind)
        except msgspec.ValidationError as error:
            if "contains unknown field" not in str(error):
                raise
            try:
                body = _with_integers(_without_empty(raw, kind, []), kind)
            except msgspec.ValidationError as other:
                # The unknown field may have been meant for the missing one.
                raise error if "missing required field" in str(other) else other from None
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    check_refused(body)
    if log.isEnabledFor(logging.DEBUG):
        _log_dropped(raw, kind)
    names = one_of(kind)
    if names and sum(getattr(body, name) is not None for name in names) != 1:
        raise InvalidParameter(names[0], f"give either {' or '.join(names)}")
    return body


def _log_dropped(raw: bytes | memoryview, kind: type) -> None:
    dropped: list[str] = []
    # Nobody has looked at what is dropped: it may be no text.
    with contextlib.suppress(UnicodeDecodeError):
        _without_empty(raw, kind, dropped)
    if dropped:
        log.debug("fields of the history that nobody reads: %s", ", ".join(dropped[:_SHOWN]))


def _without_empty(raw: bytes | memoryview, kind: type, dropped: list[str]) -> msgspec.Raw:
    """The body without unknown fields that are null or empty: they ask for nothing. The paths of
    those that histories drop are added to `dropped`. Of unknown fields no values are made."""
    body = msgspec.json.decode(raw, type=msgspec.Raw)
    return _pruned(body, _holders(inspect.type_info(kind)), "", dropped)


def _pruned(raw: msgspec.Raw, types: list[_Holder], path: str, dropped: list[str]) -> msgspec.Raw:
    begins = bytes(memoryview(raw)[:1]) if len(memoryview(raw)) > 2 else b""
    if begins == b"[" and (inner := [one for t in types for one in _items(t)]):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        kept = [_pruned(one, inner, f"{path}[{i}]", dropped) for i, one in enumerate(items)]
        return msgspec.Raw(msgspec.json.encode(kept))
    structs = [t for t in types if isinstance(t, inspect.StructType)]
    if begins != b"{" or not structs:
        return raw
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for struct in structs:
        tag = fields.get(struct.tag_field or "")
        if struct.tag_field and (tag is None or msgspec.json.decode(tag) != struct.tag):
            continue
        known = _fields(struct.cls)
        for name, value in list(fields.items()):
            below = f"{path}.{name}" if path else name
            if name in known:
                if known[name]:
                    fields[name] = _pruned(value, known[name], below, dropped)
            elif name == struct.tag_field:
                continue
            elif not struct.forbid_unknown_fields:
                dropped.append(below)
            elif (_NO_RETURN if name.startswith("return_") else _EMPTY).fullmatch(value):
                del fields[name]
    return msgspec.Raw(msgspec.json.encode(fields))


def _holders(type_: inspect.Type) -> list[_Holder]:
    """Those of the types that a value may have whose values may hold objects."""
    found = alternatives([type_])
    return [t for t in found if isinstance(t, inspect.StructType | inspect.ListType)]


def _items(type_: _Holder) -> list[_Holder]:
    return _holders(type_.item_type) if isinstance(type_, inspect.ListType) else []


@cache
def _fields(kind: type) -> dict[str, list[_Holder]]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _holders(field.type) for field in info.fields}


def _with_integers(raw: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """`raw` as `kind`; a number such as 3.0, where a field wants an integer, is one: JSON knows no
    such difference. Raises ValidationError."""
    value: Any = None
    before = ""
    for _ in range(_INTEGRAL_PLACES):
        try:
            if not before:
                return msgspec.json.decode(raw, type=kind)
            return msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            at = _PATH.search(str(error))
            if at is None or at[1] == before or not _WANTS_INTEGER.match(str(error)):
                raise
            if "[...]" in at[1]:  # it does not say where
                raise
            value, before = value if before else msgspec.json.decode(raw), at[1]
            _make_integral(value, _STEP.findall(before))
    return msgspec.convert(value, kind, str_keys=True)


def _make_integral(value: Any, path: list[str]) -> None:
    """Make the number at `path` an integer, if it is integral; in a list, all of its numbers."""
    *above, last = path
    for name in above:
        value = value[int(name[1:-1]) if name.startswith("[") else name]
    for key in range(len(value)) if isinstance(value, list) else (last,):
        number = value[key]
        if isinstance(number, float) and abs(number) < 2**63 and number.is_integer():
            value[key] = int(number)


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
