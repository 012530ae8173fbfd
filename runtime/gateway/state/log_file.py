"""Files of records: a header, then batches of records, each with its length and its checksum.

A file whose end is missing, or is damaged, is read up to there: a batch counts as a whole or not
at all.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rootlace.runtime.gateway.state.records import Record, decode, encode
from rootlace.wire.errors import InvalidRequest

VERSION = 1
_NAME = b"rootlace programs\n"
_HEADER = _NAME + struct.pack("<I", VERSION)
_BATCH = struct.Struct("<II")
"""Bytes of the records, and their CRC-32."""


class LogFile:
    """A new file that is written to. Raises OSError where it cannot be."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self.descriptor = os.open(path, flags, 0o600)
        self.size = 0
        try:
            self._write(_HEADER)
        except OSError:
            self.close()
            raise

    def append(self, records: list[Record]) -> None:
        """Hand a batch to the system, which has it then whatever becomes of this process. Raises
        OSError; the file is of no more use then."""
        data = encode(records)
        self._write(_BATCH.pack(len(data), zlib.crc32(data)) + data)

    def sync(self) -> None:
        """Wait until the disk has it all."""
        os.fdatasync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.size)  # no part of a batch
            raise
        self.size += len(data)


class Damage(Exception):
    """What is behind this place of a file cannot be read."""


def read_log(path: Path) -> Iterator[list[Record]]:
    """The batches of a file. Raises Damage behind the last one that is whole, unless the file ends
    there; InvalidRequest for one of another version; OSError."""
    data = path.read_bytes()
    if data[: len(_NAME)] == _NAME and len(data) >= len(_HEADER):
        (version,) = struct.unpack_from("<I", data, len(_NAME))
        if version != VERSION:
            raise InvalidRequest(f"{path} has version {version} of the format, not {VERSION}")
    elif not data.startswith(_HEADER):
        raise Damage(f"{path} has no whole header")
    at = len(_HEADER)
    while at < len(data):
        begin = at + _BATCH.size
        if begin > len(data):
            raise Damage(f"{path} ends within a batch")
        length, checksum = _BATCH.unpack_from(data, at)
        at = begin + length
        body = data[begin:at]
        if len(body) != length or zlib.crc32(body) != checksum:
            raise Damage(f"{path} is cut or damaged at byte {begin}")
        try:
            records = decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Damage(f"{path}, byte {begin}: {error}") from error
        yield records
