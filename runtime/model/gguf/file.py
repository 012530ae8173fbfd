"""A GGUF file, or the parts that one is split into: metadata, and where each tensor lies.

Version 2 and 3, little endian. A file is mapped to be read only, as long as the object or a view of
it lives; it may be replaced or deleted meanwhile, but not be written to.
"""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from rootlace.runtime.model.gguf.cursor import Cursor
from rootlace.runtime.model.gguf.tensor_types import TYPES, TensorType
from rootlace.runtime.model.gguf.values import Value, read_metadata
from rootlace.wire.errors import UnsupportedModel

MAGIC = b"GGUF"
MOST_METADATA = 1 << 28
"""Bytes of metadata and table of tensors, at most: those of a large vocabulary are some 2^24."""
_VERSIONS = (2, 3)
_DIMENSIONS = 4
_MOST_NUMBERS = 1 << 48
_ALIGNMENT = 32
"""What tensors are aligned to in a file that does not say."""
_TABLE_ENTRY = 8 + 4 + 8 + 4 + 8
"""Bytes that a tensor takes in the table, at least."""
_METADATA_ENTRY = 8 + 4 + 1
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_PARTS = 1000
"""More parts than any model has."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. `shape` as in PyTorch: GGUF states it the other way around."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: Path
    begin: int
    data: memoryview

    @property
    def mapping(self) -> mmap.mmap:
        """The whole file, in which `data` begins at `begin`."""
        found = self.data.obj
        assert isinstance(found, mmap.mmap)
        return found

    def __repr__(self) -> str:
        return f"{self.name} {self.type.name} {list(self.shape)}"


@dataclass(frozen=True)
class GgufFile:
    """`path` is the file that was named, of which the metadata is; `tensors` are those of all its
    parts."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Map a file, and the other parts of a split one, and read their tables.

        Raises `UnsupportedModel`, naming file and place, for whatever is not sound.
        """
        first = _Part.read(path)
        count = first.integer("split.count", 1)
        if count in (0, 1):  # 0 is what `gguf-split --merge` leaves in the file that it writes
            return cls(path, first.metadata, first.tensors)
        tensors = dict(first.tensors)
        for index, name in enumerate(_names(path, count)):
            part = first if index == 0 else _Part.read(name)
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


@dataclass(frozen=True)
class _Part:
    """One file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> _Part:
        data = _mapped(path)
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
        return part

    def integer(self, key: str, default: int) -> int:
        found = self.metadata.get(key, default)
        if type(found) is not int:
            raise UnsupportedModel(f"{self.path}: {key} is not an integer")
        return found


@dataclass(frozen=True)
class _Place:
    """An entry of the table, at byte `at` of the file; `offset` counts from where tensors begin."""

    name: str
    at: int
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size: int


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise UnsupportedModel(f"{path}: this is no GGUF file: it does not begin with GGUF")
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _header(cursor: Cursor) -> tuple[int, int]:
    """How many tensors and keys of metadata the file has."""
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


def _place(cursor: Cursor, index: int, alignment: int) -> _Place:
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
    return _Place(name, at, kind, tuple(reversed(sizes)), offset, size)


def _names(path: Path, count: int) -> list[Path]:
    """The files that the first of them, `path`, is split into."""
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
