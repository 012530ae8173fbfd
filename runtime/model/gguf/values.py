"""The metadata of a GGUF file: keys with values of twelve types, and lists of them."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from rootlace.runtime.model.gguf.cursor import Cursor

Scalar = int | float | bool | str
Value: TypeAlias = "Scalar | list[str] | list[bool] | array[int] | array[float]"
"""Lists of numbers stay arrays, which take as much memory as the file's bytes."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""The types of numbers, as `struct` and `array` call them."""
_BOOL, _TEXT, _LIST = 7, 8, 9


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """So many keys and values."""
    found: dict[str, Value] = {}
    for index in range(count):
        at = cursor.at
        key = cursor.text(f"the name of metadata {index}")
        if key in found:
            cursor.refuse(f"metadata {key!r} is there twice", at)
        found[key] = _value(cursor, key)
    return found


def _value(cursor: Cursor, key: str) -> Value:
    at, kind = cursor.at, cursor.u32(f"the type of {key!r}")
    if kind == _LIST:
        return _list(cursor, key)
    if kind == _TEXT:
        return cursor.text(f"{key!r}")
    if kind == _BOOL:
        return _flags(cursor, 1, key)[0]
    if kind not in _NUMBERS:
        cursor.refuse(f"{key!r} has a value of unknown type {kind}", at)
    return cursor.number(_NUMBERS[kind], f"{key!r}")


def _list(cursor: Cursor, key: str) -> Value:
    at, kind = cursor.at, cursor.u32(f"the type of what is in {key!r}")
    count = cursor.u64(f"the length of {key!r}")
    if kind == _BOOL:
        return _flags(cursor, count, key)
    if kind == _TEXT:
        return cursor.texts(count, f"{key!r}")
    if kind == _LIST:
        cursor.refuse(f"{key!r} is a list of lists, which are not supported", at)
    if kind not in _NUMBERS:
        cursor.refuse(f"{key!r} is a list of values of unknown type {kind}", at)
    return cursor.numbers(_NUMBERS[kind], count, f"{key!r}")


def _flags(cursor: Cursor, count: int, key: str) -> list[bool]:
    at, data = cursor.at, cursor.take(count, f"{key!r}")
    if any(byte > 1 for byte in data):
        cursor.refuse(f"{key!r} has a truth value that is neither 0 nor 1", at)
    return [byte == 1 for byte in data]
