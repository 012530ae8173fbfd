"""Numbers and texts of a mapped GGUF file, one after the other, never beyond its end."""

from __future__ import annotations

import struct
import sys
from array import array
from pathlib import Path
from typing import NoReturn

from rootlace.wire.errors import UnsupportedModel

_LENGTH = struct.Struct("<Q")
"""What stands before a text."""


class Cursor:
    """A place in a file's bytes. Raises `UnsupportedModel`, naming file and place, instead of
    reading beyond `end`. Everything is little endian."""

    def __init__(self, file: Path, data: memoryview) -> None:
        self._file = file
        self._data = data
        self.at = 0

    def refuse(self, why: str, at: int | None = None) -> NoReturn:
        """Raises `UnsupportedModel` about the byte `at`, None: where the cursor is."""
        raise UnsupportedModel(f"{self._file}: at byte {self.at if at is None else at}: {why}")

    def expect(self, size: int, what: str) -> None:
        """Refuse the file unless it has `size` bytes more."""
        left = len(self._data) - self.at
        if size > left:
            self.refuse(f"{what} would take {size} bytes, of which {left} are left")

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes, not copied."""
        self.expect(size, what)
        found = self._data[self.at : self.at + size]
        self.at += size
        return found

    def number(self, form: str, what: str) -> int | float | bool:
        """The next number, of the type that `struct` calls `form`."""
        data = self.take(struct.calcsize(f"<{form}"), what)
        found: int | float | bool = struct.unpack(f"<{form}", data)[0]
        return found

    def u32(self, what: str) -> int:
        return int(self.number("I", what))

    def u64(self, what: str) -> int:
        return int(self.number("Q", what))

    def text(self, what: str) -> str:
        """A length of 64 bits and as many bytes of UTF-8."""
        at = self.at
        data = self.take(self.u64(f"the length of {what}"), what)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8: {error}", at)

    def texts(self, count: int, what: str) -> list[str]:
        """So many texts, as `text` reads them: a vocabulary has hundreds of thousands."""
        self.expect(_LENGTH.size * count, what)
        data = self._data
        found: list[str] = []
        for _ in range(count):
            begin = self.at + _LENGTH.size
            if begin > len(data):
                self.expect(_LENGTH.size, what)
            end = begin + _LENGTH.unpack_from(data, self.at)[0]
            if end > len(data):
                found.append(self.text(f"{what}[{len(found)}]"))  # says what is wrong
            try:
                found.append(str(data[begin:end], "utf-8"))
            except UnicodeDecodeError as error:
                self.refuse(f"{what}[{len(found)}] is not UTF-8: {error}")
            self.at = end
        return found

    def numbers(self, form: str, count: int, what: str) -> array[int] | array[float]:
        """So many numbers of the type that `struct` calls `form`, as many bytes as in the file."""
        size = struct.calcsize(f"<{form}")
        data = self.take(size * count, what)
        found: array[int] | array[float] = array(form)
        found.frombytes(data)
        if sys.byteorder == "big":
            found.byteswap()
        return found
