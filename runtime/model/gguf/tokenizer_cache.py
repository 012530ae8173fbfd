"""Keep tokenizers of GGUF files for the next start of a gateway and of its engines.

To read a vocabulary of 49,000 tokens and write its `tokenizer.json` takes a quarter of a second.

    KEY.tokenizer:  crc and size of `facts`, crc of `json` | facts (msgpack) | json

An engine reads the facts alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import zlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

import rootlace.runtime.model.gguf
from rootlace.kernels.native.build import user_cache, write_whole
from rootlace.runtime.model.gguf.file import Texts
from rootlace.runtime.model.gguf.tokenizer import Vocabulary, tokenizer_config

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20
"""Least bytes of a kept `tokenizer.json`: smaller ones are made in a tenth of a second."""
MOST_FILES = 8
"""Most kept files, of up to 40 MB for a vocabulary of 262,000 tokens. The oldest goes first."""
_HEADER = struct.Struct("<III")


class TokenizerFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of a tokenizer: see `Vocabulary`. `config`: the result of `tokenizer_config`."""

    bos: int | None
    ends: tuple[int, ...]
    config: dict[str, Any]
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Self:
        config = tokenizer_config(vocabulary)
        return cls(vocabulary.bos, vocabulary.ends, config, vocabulary.remarks)


class TokenizerCache:
    """File of one kept tokenizer, which may be missing. A damaged file counts as missing."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """`metadata`: of the GGUF file."""
        self.path = user_cache() / "tokenizers" / f"{_key(metadata)}.tokenizer"

    def facts(self) -> TokenizerFacts | None:
        """Return the kept facts; None: the vocabulary has to be read."""
        try:
            with self.path.open("rb") as file:
                return self._facts(file)[0]
        except (OSError, _Damaged):
            return None

    def json(self) -> str | None:
        """Return the kept `tokenizer.json`; None: it has to be made."""
        try:
            with self.path.open("rb") as file:
                _, crc = self._facts(file)
                data = file.read()
        except (OSError, _Damaged):
            return None
        return data.decode() if zlib.crc32(data) == crc else None

    def keep(self, facts: TokenizerFacts, json: str) -> None:
        """Write the file, whole or not at all; log a failure."""
        data, head = json.encode(), msgspec.msgpack.encode(facts)
        if len(data) < LEAST_BYTES:
            return
        header = _HEADER.pack(zlib.crc32(head), len(head), zlib.crc32(data))
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.path, header + head + data)
        except OSError as error:
            log.warning("the tokenizer is not kept for the next start: %s", error)
            return
        with suppress(FileNotFoundError):  # another start deletes old ones, too
            oldest_first = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in oldest_first[:-MOST_FILES]:
                path.unlink()

    def _facts(self, file: BinaryIO) -> tuple[TokenizerFacts, int]:
        """Read the facts, and the checksum of the rest. Raises `_Damaged`."""
        if os.fstat(file.fileno()).st_uid not in (os.getuid(), 0):  # only a trusted user's file
            raise _Damaged
        try:
            crc, size, crc_of_json = _HEADER.unpack(file.read(_HEADER.size))
            head = file.read(size)
            if zlib.crc32(head) != crc:
                raise _Damaged
            return msgspec.msgpack.decode(head, type=TokenizerFacts), crc_of_json
        except (struct.error, msgspec.DecodeError) as error:
            raise _Damaged from error


class _Damaged(Exception):
    """Error of a damaged file, or of one that another user wrote."""


def _key(metadata: Mapping[str, Any]) -> str:
    """Return a digest of everything that decides the tokenizer: the file's keys on it, and the code
    that reads them."""
    digest = hashlib.sha256()
    for source in sorted(Path(rootlace.runtime.model.gguf.__path__[0]).glob("*.py")):
        digest.update(source.read_bytes())
    for key, value in sorted(metadata.items()):
        if not key.startswith(("tokenizer.", "general.name")):
            continue
        if isinstance(value, Texts):
            data = value.data
        else:
            data = value.tobytes() if isinstance(value, array) else repr(value).encode()
        digest.update(f"{key} {type(value).__name__} {len(data)} ".encode() + data)
    return digest.hexdigest()[:32]
