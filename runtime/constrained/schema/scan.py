"""JSON read byte by byte: which value begins or ends where.

The input is expected to be JSON as far as a mask holds it to that; what is not, is refused.
A state is immutable, so going back to an earlier one costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

WHITESPACE = frozenset(b" \t\n\r")
NUMBER_BYTES = frozenset(b"0123456789+-.eE")
_LITERALS = {ord("t"): b"true", ord("f"): b"false", ord("n"): b"null"}


class Kind(Enum):
    OBJECT = auto()
    ARRAY = auto()
    STRING = auto()
    KEY = auto()
    NUMBER = auto()
    LITERAL = auto()


class Expect(Enum):
    """What may come between tokens of JSON."""

    VALUE = auto()
    FIRST_ITEM = auto()  # or the end of the array
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    COLON = auto()
    SEPARATOR = auto()  # a comma, or the end of the container
    NOTHING = auto()  # the text is complete but for whitespace


@dataclass(frozen=True, slots=True)
class Frame:
    """A container that is open: `start` is the offset of its bracket, `count` how many members it
    has begun, `key` the key of the member that is being read."""

    kind: Kind
    start: int
    parent: Frame | None
    depth: int
    count: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """Where a scanner stands. `scalar` is the kind of the string, key, number or literal being
    read, `start` its offset; `rest` what is left of a literal (the length), `escape` whether the
    next byte of a string is escaped."""

    expect: Expect = Expect.VALUE
    frame: Frame | None = None
    scalar: Kind | None = None
    start: int = 0
    rest: int = 0
    escape: bool = False


START = Scan()
EXPECTED_AFTER = {None: Expect.NOTHING, Kind.ARRAY: Expect.SEPARATOR, Kind.OBJECT: Expect.SEPARATOR}


class Event(Enum):
    BEGIN = auto()  # a value begins at this offset
    END = auto()  # a value ends before this offset
    KEY = auto()  # an object's key ends before this offset


def step(state: Scan, byte: int, offset: int) -> tuple[Scan, tuple[tuple[Event, Kind, int], ...]]:
    """Take in one byte. Returns what ended or began: (event, kind, start offset of the value).

    A number ends at the byte after it, which is taken in as well: then END comes first, of the
    frame before. Raises ValueError where the text is no JSON.
    """
    if state.scalar is not None:
        return _in_scalar(state, byte, offset)
    if byte in WHITESPACE:
        return state, ()
    expect, frame = state.expect, state.frame
    if expect is Expect.FIRST_ITEM and byte == ord("]"):
        return _close(frame)
    if expect is Expect.VALUE or expect is Expect.FIRST_ITEM:
        return _begin(frame, byte, offset)
    if expect is Expect.FIRST_KEY and byte == ord("}"):
        return _close(frame)
    if (expect is Expect.KEY or expect is Expect.FIRST_KEY) and byte == ord('"'):
        return Scan(expect, frame, Kind.KEY, offset), ()
    if expect is Expect.COLON and byte == ord(":"):
        return Scan(Expect.VALUE, frame), ()
    if expect is Expect.SEPARATOR and frame is not None:
        if byte == ord(","):
            following = Expect.VALUE if frame.kind is Kind.ARRAY else Expect.KEY
            return Scan(following, frame), ()
        if byte == (ord("]") if frame.kind is Kind.ARRAY else ord("}")):
            return _close(frame)
    raise ValueError(f"byte {byte:#04x} at {offset} is not JSON here")


def with_key(state: Scan, key: str) -> Scan:
    """The state after a key ended, which is `key`."""
    frame = state.frame
    assert frame is not None
    kept = Frame(frame.kind, frame.start, frame.parent, frame.depth, frame.count + 1, key)
    return Scan(Expect.COLON, kept)


def _begin(
    frame: Frame | None, byte: int, offset: int
) -> tuple[Scan, tuple[tuple[Event, Kind, int], ...]]:
    if frame is not None and frame.kind is Kind.ARRAY:
        frame = Frame(Kind.ARRAY, frame.start, frame.parent, frame.depth, frame.count + 1)
    after = EXPECTED_AFTER[frame.kind if frame else None]
    depth = frame.depth + 1 if frame else 1
    if byte == ord("{"):
        opened = Frame(Kind.OBJECT, offset, frame, depth)
        return Scan(Expect.FIRST_KEY, opened), ((Event.BEGIN, Kind.OBJECT, offset),)
    if byte == ord("["):
        opened = Frame(Kind.ARRAY, offset, frame, depth)
        return Scan(Expect.FIRST_ITEM, opened), ((Event.BEGIN, Kind.ARRAY, offset),)
    if byte == ord('"'):
        return Scan(after, frame, Kind.STRING, offset), ((Event.BEGIN, Kind.STRING, offset),)
    if byte in _LITERALS:
        rest = len(_LITERALS[byte]) - 1
        return Scan(after, frame, Kind.LITERAL, offset, rest), (
            (Event.BEGIN, Kind.LITERAL, offset),
        )
    if byte == ord("-") or ord("0") <= byte <= ord("9"):
        return Scan(after, frame, Kind.NUMBER, offset), ((Event.BEGIN, Kind.NUMBER, offset),)
    raise ValueError(f"byte {byte:#04x} at {offset} begins no JSON value")


def _close(frame: Frame | None) -> tuple[Scan, tuple[tuple[Event, Kind, int], ...]]:
    assert frame is not None
    after = EXPECTED_AFTER[frame.parent.kind if frame.parent else None]
    return Scan(after, frame.parent), ((Event.END, frame.kind, frame.start),)


def _in_scalar(
    state: Scan, byte: int, offset: int
) -> tuple[Scan, tuple[tuple[Event, Kind, int], ...]]:
    kind = state.scalar
    if kind is Kind.STRING or kind is Kind.KEY:
        if state.escape:
            return Scan(state.expect, state.frame, kind, state.start), ()
        if byte == ord("\\"):
            return Scan(state.expect, state.frame, kind, state.start, 0, True), ()
        if byte != ord('"'):
            return state, ()
        if kind is Kind.KEY:
            return Scan(Expect.COLON, state.frame), ((Event.KEY, Kind.KEY, state.start),)
        return Scan(state.expect, state.frame), ((Event.END, Kind.STRING, state.start),)
    if kind is Kind.LITERAL:
        if state.rest > 1:
            return Scan(state.expect, state.frame, kind, state.start, state.rest - 1), ()
        return Scan(state.expect, state.frame), ((Event.END, Kind.LITERAL, state.start),)
    if byte in NUMBER_BYTES:
        return state, ()
    ended = ((Event.END, Kind.NUMBER, state.start),)
    following, events = step(Scan(state.expect, state.frame), byte, offset)
    return following, ended + events
