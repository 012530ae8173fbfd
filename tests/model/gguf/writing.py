"""Small GGUF files, well formed and malformed, byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def value(given: Any) -> bytes:
    """Write a value behind its type, as in most places of files."""
    if isinstance(given, bytes):
        return given  # written by hand
    if isinstance(given, bool):
        return u32(7) + bytes([given])
    if isinstance(given, int):
        return u32(4) + u32(given) if given >= 0 else u32(5) + struct.pack("<i", given)
    if isinstance(given, float):
        return u32(6) + struct.pack("<f", given)
    if isinstance(given, str):
        return u32(8) + text(given)
    first = value(given[0])[:4]
    return u32(9) + first + u64(len(given)) + b"".join(value(one)[4:] for one in given)


@dataclass(frozen=True)
class Entry:
    """A tensor of the table: its sizes as GGUF states them, the first one changing fastest."""

    name: str
    sizes: Sequence[int]
    kind: int
    offset: int

    def packed(self) -> bytes:
        sizes = b"".join(map(u64, self.sizes))
        return text(self.name) + u32(len(self.sizes)) + sizes + u32(self.kind) + u64(self.offset)


def gguf_bytes(
    metadata: Mapping[str, Any],
    entries: Sequence[Entry] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A whole file; `counts` are what it says of its tensors and metadata, None: the truth."""
    tensors, keys = counts or (len(entries), len(metadata))
    head = b"GGUF" + u32(version) + u64(tensors) + u64(keys)
    head += b"".join(text(key) + value(given) for key, given in metadata.items())
    head += b"".join(entry.packed() for entry in entries)
    return head + b"\0" * (-len(head) % alignment) + data


def write(path: Path, *given: Any, **more: Any) -> Path:
    path.write_bytes(gguf_bytes(*given, **more))
    return path
