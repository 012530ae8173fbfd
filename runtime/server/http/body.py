"""JSON bodies as typed structs, with errors that name the field."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import difflib
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web
from msgspec import inspect
from msgspec.inspect import ListType, Metadata, StructType, UnionType, type_info

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import ASKER
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.server_state import RareLog, kept_for_others
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest, Overloaded
from rootlace.wire.sampling import PARAMETERS, Api

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)

# Fields -------------------------------------------------------------------------------------------
#
# Standing of a body's field: served, ignored, or refused.
#
# A field without a mark is served. Marks are metadata of the field's type, so that decoding, the
# OpenAPI document and `docs/api.md` agree.


class Standing(msgspec.Struct, frozen=True):
    """Standing of a field, with its reason. A refused field may still have a value that asks for
    nothing: null, false, an empty text or list, or one of `unless`."""

    kind: str  # "ignored" or "refused"
    why: str
    unless: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "ignored":
            return f"Accepted, and changes nothing: {self.why}."
        but = f" (accepted: {', '.join(map(_shown, self.unless))})" if self.unless else ""
        return f"Refused: {self.why}{but}."


def ignored(why: str) -> msgspec.Meta:
    """Mark a field as accepted without effect here."""
    return _mark(Standing("ignored", why))


def refused(why: str, *unless: Any) -> msgspec.Meta:
    """Mark a field as known but not served; `why` may name an alternative."""
    return _mark(Standing("refused", why, unless))


def standing(field: msgspec.inspect.Field) -> Standing | None:
    """Return the mark of a field; None for a served field."""
    if isinstance(field.type, Metadata) and field.type.extra:
        found: Standing | None = field.type.extra.get("standing")
        return found
    return None


def is_refused(field: msgspec.inspect.Field) -> bool:
    mark = standing(field)
    return mark is not None and mark.kind == "refused"


def check_refused(body: msgspec.Struct, below: str = "") -> None:
    """Raise InvalidParameter for a refused field with a value, in `body` or objects in it. `below`
    is the path of `body`."""
    looked_at = _looked_at(type(body))
    for at, value in enumerate(msgspec.structs.astuple(body)):
        # 0 and {} may ask for something: a prompt's log-probabilities, a search of the web.
        if value is None or value is False or value == "" or value == [] or at not in looked_at:
            continue
        field = looked_at[at]
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
def _looked_at(kind: type[msgspec.Struct]) -> dict[int, msgspec.inspect.Field]:
    """Return the refused fields, and the fields that may hold refused ones, by their index."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    fields = enumerate(info.fields)
    return {at: f for at, f in fields if is_refused(f) or _holds_refused(f.type, set())}


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


# Suggestions --------------------------------------------------------------------------------------
#
# Suggestions for a misspelt field or path.


def _other_names() -> dict[str, tuple[str, ...]]:
    """Map each name of a sampling parameter to its names in other interfaces."""
    found: dict[str, tuple[str, ...]] = {}
    for about in PARAMETERS.values():
        known = {name for api in get_args(Api) for name in about.fields(api)}
        found |= {name: (*sorted(known - {name}),) for name in known if len(known) > 1}
    return found


_LENGTHS = ("num_predict", "max_tokens", "max_output_tokens", "max_new_tokens")
_FORMATS = ("response_format", "text.format", "output_config.format", "format", "json_schema")
# Names of other interfaces, which may look unlike ours; the first that a body has is meant. None:
# names that look alike mean something else.
_SYNONYMS = _other_names() | {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "cache_control": ("cache",),
    "enable_thinking": ("think", "thinking", "reasoning"),
    "format": _FORMATS,
    "function": ("name", "tools"),
    "functions": ("tools",),
    "input": ("prompt", "messages", "input_ids"),
    "instructions": ("system", "messages"),
    "max_completion_tokens": _LENGTHS,
    "max_new_tokens": _LENGTHS,
    "max_output_tokens": ("max_completion_tokens", *_LENGTHS),
    "max_tokens": _LENGTHS,
    "message": ("messages",),
    "messages": ("input", "prompt", "text"),
    "num_predict": _LENGTHS,
    "options": ("sampling_params",),
    "output_format": _FORMATS,
    "prompt": ("messages", "text", "input"),
    "request_id": ("rid",),
    "response_format": _FORMATS,
    "rid": ("request_id",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("instructions", "messages"),
    "text": ("prompt", "messages", "input"),
    "think": ("enable_thinking", "thinking", "reasoning"),
    "thinking": ("think", "reasoning"),
    "user": ("metadata.user_id",),
}
LONGEST = 64
"""Longest name compared: comparing long texts takes seconds."""
_TYPO_STEP = re.compile(r"\.?(\w+)|\[(?:\d+|\.\.\.)\]")


def field_suggestion(
    kind: type, path: str, field: str, elsewhere: Collection[str] = frozenset()
) -> str:
    """Ask whether another name was meant, for an unknown `field` of the object at `path` of a
    `kind`. Returns "" where no name is near. Refused fields are never suggested. `elsewhere`:
    fields of other bodies, which are no misspellings."""
    here = [f for struct in _structs_at(kind, path) for f in struct.fields if not is_refused(f)]
    known = [f.encode_name for f in here]
    within = [
        f"{f.encode_name}.{inner.encode_name}"
        for f in here
        for type_ in alternatives([f.type])
        for inner in _fields_of(type_)
        if not is_refused(inner)
    ]
    meant = [
        full
        for name in (field, *_SYNONYMS.get(field, ()))
        for full in (*known, *within)
        if full == name or full.endswith(f".{name}")
    ]
    if not meant and field not in _SYNONYMS and field not in elsewhere:
        meant = nearest(field, known)
    if meant:
        return f". Did you mean {meant[0]!r}?"
    return ". It is a field of other endpoints" if field in elsewhere else ""


def nearest(name: str, known: Iterable[str], at_most: int = 1) -> list[str]:
    """Return the names in `known` most like `name`, best first."""
    if len(name) > LONGEST:
        return []
    return difflib.get_close_matches(name, list(dict.fromkeys(known)), at_most, cutoff=0.6)


def _fields_of(type_: inspect.Type) -> tuple[inspect.Field, ...]:
    """Return an object's fields; none of a tagged object, which is one of several."""
    return type_.fields if isinstance(type_, inspect.StructType) and type_.tag is None else ()


@cache
def _info(kind: type) -> inspect.Type:
    """Return msgspec's description of a body's type; cached, for it takes milliseconds."""
    return inspect.type_info(kind)


def _structs_at(kind: type, path: str) -> Iterator[inspect.StructType]:
    """Give the objects that may stand at a path such as `messages[0].content[1]`."""
    types = [_info(kind)]
    for step in _TYPO_STEP.finditer(path):
        name = step[1]
        structs: list[inspect.Type] = []
        for type_ in alternatives(types):
            if name and isinstance(type_, inspect.StructType):
                structs += [f.type for f in type_.fields if f.encode_name == name]
            elif not name and isinstance(type_, inspect.DictType):
                structs.append(type_.value_type)
            elif not name and isinstance(type_, inspect.ListType):
                structs.append(type_.item_type)
        types = structs
    return (t for t in alternatives(types) if isinstance(t, inspect.StructType))


def alternatives(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Give the types without metadata, unions as their members."""
    for type_ in types:
        if isinstance(type_, inspect.Metadata):
            yield from alternatives([type_.type])
        elif isinstance(type_, inspect.UnionType):
            yield from alternatives(type_.types)
        else:
            yield type_


def choices_at(kind: type, path: str) -> str:
    """List the values allowed for the field at `path` of a body of type `kind`; "" where any value
    is. Adds the reason for there being no other `type`, from a class's `ONLY`."""
    above, _, name = path.rpartition(".")
    name = name.partition("[")[0]
    known: list[str] = []
    why = ""
    for struct in _structs_at(kind, above):
        known += [repr(struct.tag)] if struct.tag_field == name else []
        for type_ in alternatives([f.type for f in struct.fields if f.encode_name == name]):
            items = [type_.item_type] if isinstance(type_, inspect.ListType) else [type_]
            for item in alternatives(items):
                if isinstance(item, inspect.LiteralType):
                    known += map(repr, item.values)
                elif isinstance(item, inspect.BoolType):
                    known += ["true", "false"]
        if name == "type":
            why = why or getattr(struct.cls, "ONLY", "")
    if not known:
        return ""
    listed = f"there is {known[0]}" if len(known) == 1 else f"there are {', '.join(known)}"
    return f" ({listed}{': ' if why else ''}{why})"


# Json weight --------------------------------------------------------------------------------------
#
# Cost of making the values of a JSON text, estimated from its characters.
#
# Decoding keeps the interpreter's lock until all values are made. Numpy, which counts the
# characters, releases it.


CONTAINER = 12
"""Weight of an array, an object or an object's member, in numbers of an array."""

_WEIGHTS = {",": 1, "[": CONTAINER, "{": CONTAINER, ":": CONTAINER}
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

_Bytes = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.intp]


def weight_beyond(raw: bytes | memoryview, limit: int) -> bool:
    """Return whether the values weigh more than `limit`: a number is 1, a string 2."""
    text = np.frombuffer(raw, np.uint8)
    marks = {mark: int(np.count_nonzero(text == ord(mark))) for mark in _WEIGHTS}
    quotes = int(np.count_nonzero(text == _QUOTE))
    if sum(_WEIGHTS[mark] * count for mark, count in marks.items()) + quotes // 2 <= limit:
        return False
    # Marks within strings are text, but were counted above.
    quotes_at = _closing(text)
    weight = quotes_at.size // 2
    for mark, each in _WEIGHTS.items():
        places = np.flatnonzero(text == ord(mark))
        within = np.searchsorted(quotes_at, places) & 1
        weight += each * int(np.count_nonzero(within == 0))
    return weight > limit


def _closing(text: _Bytes) -> _Places:
    """Return the places of strings' ends: quotes behind an even number of backslashes."""
    quotes = np.flatnonzero(text == _QUOTE)
    slashes = np.flatnonzero(text == _BACKSLASH)
    if not slashes.size:
        return quotes
    # For each backslash, where its run begins; for each quote, the run that ends before it.
    begins = np.ones(slashes.size, bool)
    begins[1:] = np.diff(slashes) != 1
    run = np.maximum.accumulate(np.where(begins, slashes, 0))
    last = np.searchsorted(slashes, quotes) - 1
    follows = (last >= 0) & (slashes[last] == quotes - 1)
    length = np.where(follows, quotes - run[last], 0)
    return quotes[length % 2 == 0]


# Receiving ----------------------------------------------------------------------------------------
#
# Bodies being received, with a bound on the bytes of all together.
#
# Each body has a bound of its own, but thousands of connections may each send a large one slowly.


BODY_SECONDS = 120.0
"""Time after which a body that has not come is refused, which frees its connection."""
LARGEST = 16
"""Default bound: bodies of the largest size that may be received at once."""


class Receiving:
    """Bodies being received by a server. The last eighth of the bound is for clients below the
    mean. A client is a key or, without a key, an address (of IPv6, a /64)."""

    def __init__(self, config: GatewayConfig) -> None:
        self._max_bytes = config.max_receiving_bytes or LARGEST * config.max_body_bytes
        self._taken = 0
        self._of: Counter[str] = Counter()
        self._rare = RareLog(log)

    async def read(self, request: web.Request) -> bytes:
        """Return a request's body as sent. Raises DeadlineExceeded for a slow body, Overloaded
        where there is no room for it, and aiohttp's 413."""
        if _RAW in request:
            return request[_RAW]
        client = ASKER.get().client
        body = bytearray()
        try:
            content = request.content
            async with asyncio.timeout(None if content.is_eof() else BODY_SECONDS):
                while piece := await content.readany():
                    if len(body) + len(piece) > request.client_max_size:
                        raise web.HTTPRequestEntityTooLarge(request.client_max_size)
                    self.take(client, len(body), len(piece))
                    body += piece
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not come within {BODY_SECONDS:g} s") from None
        finally:
            self.release(client, len(body))
        request[_RAW] = bytes(body)
        return request[_RAW]

    def take(self, client: str, come: int, more: int) -> None:
        """Count `more` bytes of a client's body, `come` of which are there. Raises Overloaded."""
        full = self._taken + more > self._max_bytes
        alone = self._taken == come  # has its own bound, and would never find more room
        own, owners = self._of.get(client, 0), len(self._of)
        if not alone and (full or kept_for_others(own, owners, self._taken, self._max_bytes, more)):
            self._rare.warn("bodies of %d bytes are being received: one is refused", self._taken)
            raise Overloaded("the server is receiving too many large bodies; try again")
        self._taken += more
        self._of[client] += more

    def release(self, client: str, come: int) -> None:
        """Forget the bytes of a body that is complete or failed."""
        self._taken -= come
        self._of[client] -= come
        if not self._of[client]:
            del self._of[client]


RECEIVING = web.AppKey("receiving", Receiving)
_RAW = web.RequestKey("raw", bytes)


# Body ---------------------------------------------------------------------------------------------


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies. An unknown field is an error unless it asks for nothing: its value is
    null or empty, or it is false and its name begins with `return_`."""


Group = tuple[msgspec.Meta, Any, str]
"""Mark of several fields, their type, and their names."""


def with_fields(*groups: Group) -> Callable[[type[T]], type[T]]:
    """Give a body fields without effect or not served, which no code reads; null is their
    default."""
    found = [(Annotated[kind | None, mark], names.split()) for mark, kind, names in groups]
    return extended([(name, kind, None) for kind, names in found for name in names])


def extended(fields: list[tuple[str, Any, Any]]) -> Callable[[type[T]], type[T]]:
    """Make a decorator that adds (name, type, default) to a body."""

    def whole(body: type[T]) -> type[T]:
        how = {"module": body.__module__, "kw_only": True, "forbid_unknown_fields": True}
        found = msgspec.defstruct(body.__name__, fields, bases=(body,), **how)  # type: ignore[arg-type]
        assert issubclass(found, body)
        return found

    return whole


class History(Body, forbid_unknown_fields=False):
    """Base of objects of a conversation that clients send back. Unknown fields are dropped: clients
    append answers with additions of their own and of other servers."""


_MOST = 2**14
"""Most messages: each costs time before a length can be checked."""
MANY = msgspec.Meta(max_length=_MOST)
SOME = msgspec.Meta(min_length=1, max_length=_MOST)

LARGE_BYTES = 2**16
"""Size from which a body is decoded in a thread, and weighed before its values are made."""
MAX_WEIGHT = 1_100_000
"""Most weight: decoding takes 35 ns for each, and blocks all other threads."""

_List = inspect.ListType | inspect.VarTupleType
_EMPTY = re.compile(rb'null|""|\[\s*\]|\{\s*\}')
_NO_RETURN = re.compile(_EMPTY.pattern + rb"|false")
_SHOWN = 32
"""Most dropped fields named in the log."""

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_NUMBER_CHARACTERS = 32
_NUMBER = re.compile(rb"-?\d[-+.\deE]*")
_Item = int | float | bool | str | list[msgspec.Raw] | dict[str, msgspec.Raw] | None
_FIELD = re.compile(r"(missing required|contains unknown) field `([^`]*)`")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Read a request's body as `kind`.

    Raises InvalidRequest if the body is not JSON. Raises InvalidParameter if a field is unknown,
    missing, refused or of a wrong type, and as `Receiving.read` does.
    """
    return await decode_anywhere(await request.app[RECEIVING].read(request), kind)


async def decode_anywhere(raw: bytes | memoryview, kind: type[T]) -> T:
    """Decode with `decode_body`, a large body in a thread."""
    if len(raw) <= LARGE_BYTES:
        return decode_body(raw, kind)
    return await asyncio.to_thread(decode_body, raw, kind)


def decode_body(raw: bytes | memoryview, kind: type[T]) -> T:
    """Decode a body that has been read. Raises as `read_body` does."""
    if len(raw) > LARGE_BYTES and weight_beyond(raw, MAX_WEIGHT):
        raise InvalidRequest(
            f"the body holds more than {MAX_WEIGHT} values (a string counts two, an array, an"
            f" object or a member of one {CONTAINER})"
        )
    try:
        try:
            body = msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            body = _leniently(raw, kind)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
        if bytes(raw[:3]).startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            reason = "it begins with a byte order mark; send UTF-8 without one"
        raise InvalidRequest(f"the body is not valid JSON: {reason}") from None
    check_refused(body)
    if log.isEnabledFor(logging.DEBUG):
        _log_dropped(raw, kind)
    names: tuple[str, ...] = getattr(kind, "one_of", ())
    if names and sum(getattr(body, name) is not None for name in names) != 1:
        raise InvalidParameter(names[0], f"give either {' or '.join(names)}")
    return body


def _leniently(raw: bytes | memoryview, kind: type[T]) -> T:
    """Decode `raw` with numbers such as 3.0 as integers, since JSON knows no such difference, and
    without unknown fields that ask for nothing. Raises ValidationError."""
    mended = raw
    with contextlib.suppress(msgspec.ValidationError, RecursionError):  # decoding `raw` says where
        mended = _mended(raw, kind, [])
    try:
        return msgspec.json.decode(mended, type=kind)
    except msgspec.ValidationError as other:
        if "missing required field" not in str(other):
            raise
    return msgspec.json.decode(raw, type=kind)  # an unknown field may be meant for the missing one


def _log_dropped(raw: bytes | memoryview, kind: type) -> None:
    dropped: list[str] = []
    # Dropped fields were never checked: they may not be text.
    with contextlib.suppress(UnicodeDecodeError):
        _mended(raw, kind, dropped)
    if dropped:
        log.debug("fields of the history that nobody reads: %s", ", ".join(dropped[:_SHOWN]))


def _mended(raw: bytes | memoryview, kind: type, dropped: list[str]) -> msgspec.Raw:
    """Return the body without unknown fields that are null or empty, and with integers in place of
    integral numbers. Paths of fields that a `History` drops are added to `dropped`. Values of
    unknown fields are never made."""
    body = msgspec.json.decode(raw, type=msgspec.Raw)
    return _mended_value(body, _mendable(_info(kind)), "", dropped)


def _mended_value(
    raw: msgspec.Raw, types: list[inspect.Type], path: str, dropped: list[str]
) -> msgspec.Raw:
    text = bytes(memoryview(raw)[:_NUMBER_CHARACTERS])
    if text[:1] == b"[" and (inner := [one for t in types for one in _items(t)]):
        items: list[Any] = msgspec.json.decode(raw, type=list[_Item])
        for i, one in enumerate(items):
            if isinstance(one, list | dict):
                item = msgspec.Raw(msgspec.json.encode(one))
                items[i] = _mended_value(item, inner, f"{path}[{i}]", dropped)
            elif isinstance(one, float):
                items[i] = _integer(one)
        return msgspec.Raw(msgspec.json.encode(items))
    if _NUMBER.fullmatch(text) and any(isinstance(t, inspect.IntType) for t in types):
        return msgspec.Raw(msgspec.json.encode(_integer(msgspec.json.decode(raw))))
    structs = [t for t in types if isinstance(t, inspect.StructType)]
    if text[:1] != b"{" or not structs:
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
                    fields[name] = _mended_value(value, known[name], below, dropped)
            elif name == struct.tag_field:
                continue
            elif not struct.forbid_unknown_fields:
                dropped.append(below)
            elif (_NO_RETURN if name.startswith("return_") else _EMPTY).fullmatch(value):
                del fields[name]
    return msgspec.Raw(msgspec.json.encode(fields))


def _integer(value: Any) -> Any:
    """Return an integral number as an integer, any other value as it is."""
    integral = isinstance(value, float) and abs(value) < 2**63 and value.is_integer()
    return int(value) if integral else value


def _mendable(type_: inspect.Type) -> list[inspect.Type]:
    """Return the possible types of a value that `_mended_value` looks at."""
    looked_at = inspect.StructType | _List | inspect.IntType
    found = [one for one in alternatives([type_]) if isinstance(one, looked_at)]
    takes_any = any(isinstance(one, inspect.FloatType) for one in alternatives([type_]))
    return [one for one in found if not (takes_any and isinstance(one, inspect.IntType))]


def _items(type_: inspect.Type) -> list[inspect.Type]:
    return _mendable(type_.item_type) if isinstance(type_, _List) else []


@cache
def _fields(kind: type) -> dict[str, list[inspect.Type]]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _mendable(field.type) for field in info.fields}


def convert(value: object, kind: type[T], param: str) -> T:
    """Convert `value` (decoded JSON) to `kind`; errors name the path below `param`."""
    try:
        body = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind, param) from None
    check_refused(body, param)
    return body


@cache
def _all_names() -> frozenset[str]:
    """Return the names of fields of all endpoints' bodies; all are defined when one is decoded."""
    kinds, names = [Body], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        names.update(kind.__struct_encode_fields__)
    return frozenset(names)


def as_parameter(message: str, kind: type, below: str = "") -> InvalidRequest:
    """Turn msgspec's message on a wrong value of `kind` into an error that names the field."""
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


# Query --------------------------------------------------------------------------------------------


def read_query(request: web.Request, kind: type[T]) -> T:
    """Read the query as `kind`, numbers from their digits. Of a repeated parameter the first value
    counts. Raises InvalidParameter for a wrong, unknown or refused one."""
    try:
        query = msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind) from None
    check_refused(query)
    return query
