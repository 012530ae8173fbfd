"""Read a GGUF file, or the parts of a split one: metadata, and the place of each tensor.

Versions 2 and 3 are read, little endian. A file is mapped read-only, as long as the object or a
view of its bytes lives. Meanwhile it may be replaced or deleted, but not be written to.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from rootlace.runtime.model.checkpoint.quantised.layouts import (
    ALL,
    FLOATS,
    Expected,
    Layout,
    Quantisation,
    Rule,
)
from rootlace.wire.errors import UnsupportedModel

# Cursor -------------------------------------------------------------------------------------------
#
# Read numbers and texts of a mapped GGUF file one by one, never beyond its end.


_LENGTH = struct.Struct("<Q")
"""Length before a text."""


class Cursor:
    """Cursor in a file's bytes, all little endian. A read beyond the end raises `UnsupportedModel`
    instead, naming file and place."""

    def __init__(self, file: Path, data: memoryview) -> None:
        self._file = file
        self._data = data
        self.at = 0

    def refuse(self, why: str, at: int | None = None) -> NoReturn:
        """Raise `UnsupportedModel` about the byte `at`; None: at the cursor."""
        raise UnsupportedModel(f"{self._file}: at byte {self.at if at is None else at}: {why}")

    def expect(self, size: int, what: str) -> None:
        """Refuse the file unless it has `size` bytes more."""
        left = len(self._data) - self.at
        if size > left:
            self.refuse(f"{what} would take {size} bytes, of which {left} are left")

    def take(self, size: int, what: str) -> memoryview:
        """Return the next `size` bytes, not copied."""
        self.expect(size, what)
        found = self._data[self.at : self.at + size]
        self.at += size
        return found

    def number(self, form: str, what: str) -> int | float | bool:
        """Return the next number, of the `struct` type `form`."""
        data = self.take(struct.calcsize(f"<{form}"), what)
        found: int | float | bool = struct.unpack(f"<{form}", data)[0]
        return found

    def u32(self, what: str) -> int:
        return int(self.number("I", what))

    def u64(self, what: str) -> int:
        return int(self.number("Q", what))

    def text(self, what: str) -> str:
        """Return a text: a length of 64 bits, then that many bytes of UTF-8."""
        at = self.at
        data = self.take(self.u64(f"the length of {what}"), what)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8: {error}", at)

    def texts(self, count: int, what: str) -> Texts:
        """Return the next `count` texts, each as `text` reads it."""
        self.expect(_LENGTH.size * count, what)
        data, begin, at, size = self._data, self.at, self.at, len(self._data)
        for index in range(count):
            end = at + 8 + _LENGTH.unpack_from(data, at)[0] if at + 8 <= size else size + 1
            if end > size:
                self.at = at
                self.text(f"{what}[{index}]")  # raises, with the reason
            at = end
        self.at = at
        return Texts(self._file, bytes(data[begin:at]), count, what)

    def numbers(self, form: str, count: int, what: str) -> array[int] | array[float]:
        """Read `count` numbers of the `struct` type `form`, as many bytes as in the file."""
        size = struct.calcsize(f"<{form}")
        data = self.take(size * count, what)
        found: array[int] | array[float] = array(form)
        found.frombytes(data)
        if sys.byteorder == "big":
            found.byteswap()
        return found


class Texts:
    """Texts of a file, decoded at each read. The bytes are copied: the file may be overwritten
    later."""

    def __init__(self, file: Path, data: bytes, count: int, what: str) -> None:
        self._file, self.data, self._what = file, data, what
        self._count = count

    def __len__(self) -> int:
        return self._count

    def tolist(self) -> list[str]:
        """Return the texts. Raises `UnsupportedModel` for bytes that are not UTF-8."""
        data, at = self.data, 0
        found: list[str] = []
        for index in range(self._count):
            begin = at + 8
            at = begin + _LENGTH.unpack_from(data, at)[0]
            try:
                found.append(data[begin:at].decode())
            except UnicodeDecodeError as error:
                what = f"{self._what}[{index}] is not UTF-8: {error}"
                raise UnsupportedModel(f"{self._file}: {what}") from None
        return found


# Tensor types -------------------------------------------------------------------------------------
#
# List the types of GGUF's tensors: a block's numbers and bytes.


class TensorType(msgspec.Struct, frozen=True):
    """Type of a tensor: a block is `numbers` consecutive numbers of a row, in `bytes` bytes."""

    name: str
    numbers: int
    bytes: int


_TYPES = """
    0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34,
    9 Q8_1 32 40, 10 Q2_K 256 84, 11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176,
    14 Q6_K 256 210, 15 Q8_K 256 292, 16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98,
    19 IQ1_S 256 50, 20 IQ4_NL 32 18, 21 IQ3_S 256 110, 22 IQ2_S 256 82, 23 IQ4_XS 256 136,
    24 I8 1 1, 25 I16 1 2, 26 I32 1 4, 27 I64 1 8, 28 F64 1 8, 29 IQ1_M 256 56, 30 BF16 1 2,
    34 TQ1_0 256 54, 35 TQ2_0 256 66, 39 MXFP4 32 17, 40 NVFP4 64 36, 41 Q1_0 128 18
"""
"""Number in a file, name, numbers of a block, bytes of a block."""
TYPES = {
    int(number): TensorType(name, int(count), int(size))
    for number, name, count, size in (row.split() for row in _TYPES.split(","))
}
"""Tensor types by their number in a file; `CODES` lists types that products can use."""


# Values -------------------------------------------------------------------------------------------
#
# Read a GGUF file's metadata: keys with values of twelve types, and lists of such values.


Scalar = int | float | bool | str
Value: TypeAlias = "Scalar | Texts | list[bool] | array[int] | array[float]"
"""Value of metadata. Lists of numbers stay arrays, as large as the file's bytes."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Types of numbers, by the letters of `struct` and `array`."""
_BOOL, _TEXT, _LIST = 7, 8, 9


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """Read `count` keys and their values."""
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


# File ---------------------------------------------------------------------------------------------


MAGIC = b"GGUF"
MOST_METADATA = 1 << 28
"""Most bytes of metadata and table of tensors; a large vocabulary takes some 2^24."""
_VERSIONS = (2, 3)
_DIMENSIONS = 4
_MOST_NUMBERS = 1 << 48
_ALIGNMENT = 32
"""Alignment of tensors in a file that does not state one."""
_TABLE_ENTRY = 8 + 4 + 8 + 4 + 8
"""Least bytes of a tensor in the table."""
_METADATA_ENTRY = 8 + 4 + 1
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_PARTS = 1000
"""Most parts of a model."""


class Tensor(msgspec.Struct, frozen=True):
    """Tensor of a file. `shape` is in PyTorch's order: GGUF states the reverse."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: Path
    begin: int
    data: memoryview

    @property
    def mapping(self) -> mmap.mmap:
        """Map of the whole file, in which `data` begins at `begin`."""
        found = self.data.obj
        assert isinstance(found, mmap.mmap)
        return found

    def __repr__(self) -> str:
        return f"{self.name} {self.type.name} {list(self.shape)}"


class GgufFile(msgspec.Struct, frozen=True, weakref=True):
    """GGUF file, with all its parts. `path`: the file that was named, which has the `metadata`.
    `tensors`: those of all parts."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Map a file, and the other parts of a split one, and read their tables. A file in use is
        not read again, unless it was replaced: a start needs it five times.

        Raises `UnsupportedModel`, naming file and place, if anything is damaged.
        """
        try:
            about = path.stat()
        except OSError:
            return cls._read(path)  # raises, with the reason
        key = (path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        known = _READ.get(key)
        if known is None:
            known = cls._read(path)
            if not _PART.fullmatch(path.name):  # other parts may be replaced alone
                _READ[key] = known
        return known

    @classmethod
    def _read(cls, path: Path) -> GgufFile:
        first = cls._part(path)
        count = first.integer("split.count", 1)
        if count in (0, 1):  # 0 is what `gguf-split --merge` leaves in the file that it writes
            return first
        tensors = dict(first.tensors)
        for index, name in enumerate(_names(path, count)):
            part = first if index == 0 else cls._part(name)
            if part.integer("split.no", 0) != index or part.integer("split.count", 1) != count:
                raise UnsupportedModel(
                    f"{part.path}: split.no and split.count are not those of part {index + 1} of "
                    f"{count}"
                )
            twice = tensors.keys() & part.tensors.keys() if index else ()
            if twice:
                raise UnsupportedModel(f"{part.path}: {min(twice)} is also in another part")
            tensors |= part.tensors
        stated = first.integer("split.tensors.count", len(tensors))
        if stated != len(tensors):
            raise UnsupportedModel(
                f"{path}: split.tensors.count is {stated}, but the parts have {len(tensors)}"
            )
        return cls(path, first.metadata, tensors)

    @classmethod
    def _part(cls, path: Path) -> GgufFile:
        """Read one file of a model, which may be split into several."""
        mapping = _mapped(path)
        data = memoryview(mapping)
        cursor = Cursor(path, data[:MOST_METADATA])
        tensor_count, metadata_count = _header(cursor)
        cursor.expect(_METADATA_ENTRY * metadata_count, f"metadata of {metadata_count} keys")
        metadata = read_metadata(cursor, metadata_count)
        part = cls(path, metadata, {})
        alignment = part.integer("general.alignment", _ALIGNMENT)
        if not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise UnsupportedModel(f"{path}: general.alignment {alignment} is no power of two")
        cursor.expect(_TABLE_ENTRY * tensor_count, f"a table of {tensor_count} tensors")
        places = [_place(cursor, index, alignment) for index in range(tensor_count)]
        begin = -(-cursor.at // alignment) * alignment
        end = begin
        for place in sorted(places, key=lambda place: place.offset):
            start = begin + place.offset
            if start < end:
                cursor.refuse(f"{place.name!r} overlaps the tensor before it", place.at)
            end = start + place.size
            if end > len(data):
                cursor.refuse(
                    f"{place.name!r} would end at byte {end}, the file at {len(data)}: it may have "
                    "been cut short",
                    place.at,
                )
            if place.name in part.tensors:
                cursor.refuse(f"{place.name!r} is there twice", place.at)
            part.tensors[place.name] = Tensor(
                place.name, place.type, place.shape, path, start, data[start:end]
            )
        if hasattr(mmap, "MADV_DONTNEED"):  # all that was read was copied
            with suppress(OSError):  # locked pages
                mapping.madvise(mmap.MADV_DONTNEED, 0, cursor.at)
        return part

    def integer(self, key: str, default: int) -> int:
        found = self.metadata.get(key, default)
        if type(found) is not int:
            raise UnsupportedModel(f"{self.path}: {key} is not an integer")
        return found


_READ: WeakValueDictionary[tuple[Path, int, int, int, int], GgufFile] = WeakValueDictionary()


class _TableEntry(msgspec.Struct, frozen=True):
    """Entry of the table, at byte `at` of the file; `offset` counts from the first tensor."""

    name: str
    at: int
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size: int


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise UnsupportedModel(f"{path}: this is no GGUF file: it does not begin with GGUF")
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _header(cursor: Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata keys."""
    cursor.take(len(MAGIC), "the header")
    at, version = cursor.at, cursor.u32("the version")
    if version & 0xFFFF == 0:
        cursor.refuse(
            "the file is big endian, which is not supported; convert it with "
            "`gguf-convert-endian FILE little` (pip install gguf)",
            at,
        )
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        cursor.refuse(f"GGUF version {version} is not supported, only {known}", at)
    return cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")


def _place(cursor: Cursor, index: int, alignment: int) -> _TableEntry:
    at = cursor.at
    name = cursor.text(f"the name of tensor {index}")
    dimensions = cursor.u32(f"the dimensions of {name!r}")
    if not 0 < dimensions <= _DIMENSIONS:
        cursor.refuse(f"{name!r} has {dimensions} dimensions, not 1 to {_DIMENSIONS}", at)
    sizes = [cursor.u64(f"the shape of {name!r}") for _ in range(dimensions)]
    numbers = math.prod(sizes)
    if not 0 < numbers < _MOST_NUMBERS:
        cursor.refuse(f"{name!r} has a shape of {sizes}", at)
    number = cursor.u32(f"the type of {name!r}")
    if number not in TYPES:
        cursor.refuse(f"{name!r} has a type of number {number}, which is not known", at)
    kind = TYPES[number]
    if sizes[0] % kind.numbers:
        cursor.refuse(f"{name!r} has rows of {sizes[0]}, not of whole blocks of {kind.name}", at)
    offset = cursor.u64(f"the place of {name!r}")
    if offset % alignment or offset > _MOST_NUMBERS:
        cursor.refuse(f"{name!r} lies at {offset}, which is no multiple of {alignment}", at)
    size = numbers // kind.numbers * kind.bytes
    return _TableEntry(name, at, kind, tuple(reversed(sizes)), offset, size)


def _names(path: Path, count: int) -> list[Path]:
    """Return all files of a split model, of which `path` is the first."""
    match = _PART.fullmatch(path.name)
    if match is None or count > _PARTS or int(match[3]) != count:
        raise UnsupportedModel(
            f"{path}: it is one of {count} parts (split.count), but its name does not end in "
            f"-00001-of-{count:05}.gguf"
        )
    names = [
        path.with_name(f"{match[1]}-{n:05}-of-{match[3]}{match[4]}") for n in range(1, count + 1)
    ]
    if path != names[0]:
        raise UnsupportedModel(f"{path}: a part of a model; name the first one, {names[0].name}")
    missing = [name.name for name in names if not name.is_file()]
    if missing:
        raise UnsupportedModel(f"{path}: other parts are missing: {', '.join(missing[:5])}")
    return names


# Layout -------------------------------------------------------------------------------------------
#
# List the supported types of a GGUF file's weights, and their codes.


CODES = {
    "Q8_0": "int8",
    "Q4_0": "int4",
    "Q4_1": "uint4",
    "Q5_0": "int8",
    "Q5_1": "int8",
    "Q4_K": "uint4",
    "Q5_K": "int8",
    "Q6_K": "int8",
    "IQ4_NL": "nl4",
    "IQ4_XS": "nl4",
    "MXFP4": "e2m1",
}
"""Types of blocks that are supported -> the codes of the weights."""


class Ggml(Layout, frozen=True):
    """Layout of a weight in blocks of a `type`."""

    type: str

    @property
    def codes(self) -> str:
        return CODES[self.type]

    def stores(self, module: str, types: Mapping[str, str]) -> bool:
        return types.get(f"{module}.weight") == self.type

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        return {".weight": Expected(((rows, columns),), frozenset({self.type}))}


def quantisation_of(file: GgufFile) -> Quantisation | None:
    """Return the storage of the file's weights, each by its type; None: all are floats."""
    found = {tensor.type.name for tensor in file.tensors.values()} - FLOATS
    layouts = tuple(Ggml(name) for name in CODES if name in found)
    return (
        Quantisation(f"GGUF: {', '.join(sorted(found))}", (Rule(ALL, layouts),)) if found else None
    )


def check_types(file: GgufFile) -> None:
    """Raise `UnsupportedModel`, with an alternative, for unsupported types of weights."""
    for tensor in file.tensors.values():
        name, shape = tensor.type.name, list(tensor.shape)
        if name not in FLOATS and (name not in CODES or len(shape) not in (2, 3)):
            known = ", ".join((*sorted(FLOATS), *CODES))
            raise UnsupportedModel(
                f"{tensor.file}: {tensor.name} {shape} is stored as {name}, which is not read; "
                f"take a file of the model with other types, such as Q4_K_M (read: {known})"
            )
