"""Files that clients sent or batches wrote, within bounds."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rootlace.runtime.gateway.http.batches.records import Records
from rootlace.runtime.gateway.shares import kept_for_others
from rootlace.wire.errors import Overloaded


@dataclass(frozen=True)
class Bounds:
    """What a folder may hold, and for how many seconds. Of files and bytes the last eighth is for
    API keys that have less than the mean."""

    file_bytes: int = 100 * 2**20
    total_bytes: int = 2 * 2**30
    files: int = 2000
    seconds: int = 30 * 24 * 3600


class File(msgspec.Struct):
    """OpenAI's file object, as it is kept and as it is shown."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    owner: str = ""


_OURS = re.compile(r"upload-[0-9a-f]{32}|file-[0-9a-f]{32}(-output|-errors)?")
"""Names of contents: in the folder there may be what is somebody else's."""


class FileStore:
    """The files of a folder: `NAME.json` says what `NAME` holds."""

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        self.bounds = bounds
        self.records = Records(folder, File, "file")
        self._folder = folder
        self._bytes: Counter[str] = Counter()
        """By owner, also of what is being written."""
        for file in self.records.all():
            self._bytes[file.owner] += file.bytes
        self._writing: dict[Path, tuple[str, int]] = {}

    def path(self, id_: str) -> Path:
        """Where the content of a file is, or will be; `id_` is one that this server made."""
        return self._folder / id_

    def new_upload(self, owner: str) -> Path:
        """Where the content of a file that is being sent can be written: it counts until it is
        added or dropped. Raises Overloaded if there are so many files that none can be sent."""
        owners = Counter(file.owner for file in self.records.all())
        owners.update(owner for owner, _ in self._writing.values())
        own, taken, most = owners.get(owner, 0), owners.total(), self.bounds.files
        if taken >= most:
            raise Overloaded(f"{most} files are kept at most: delete some")
        if owner and kept_for_others(own, len(owners), taken, most):
            raise Overloaded(
                f"this API key has {own} files, the last of {most} are for others: delete some"
            )
        content = self._folder / f"upload-{uuid.uuid4().hex}"
        self._writing[content] = owner, 0
        return content

    def grow(self, content: Path, owner: str, size: int) -> None:
        """Count what is being written to `content` with `size` bytes, before it has them. Raises
        Overloaded if there is no room for them."""
        had = self._writing.get(content, (owner, 0))[1]
        taken, most, more = self._bytes.total(), self.bounds.total_bytes, size - had
        own, owners = self._bytes[owner], sum(map(bool, self._bytes.values()))
        if taken + more > most:
            raise Overloaded(f"files of {most >> 20} MiB are kept at most: delete some")
        if owner and kept_for_others(own, owners, taken, most, more):
            raise Overloaded(
                f"this API key has files of {own >> 20} MiB, the last of {most >> 20} are for "
                "others: delete some"
            )
        self._writing[content] = owner, size
        self._bytes[owner] += more

    def drop(self, content: Path) -> None:
        """Delete what was being written, if it was not added."""
        self._forget(content)
        content.unlink(missing_ok=True)

    def _forget(self, content: Path) -> None:
        owner, size = self._writing.pop(content, ("", 0))
        self._bytes[owner] -= size

    def add(self, content: Path, filename: str, purpose: str, owner: str, id_: str = "") -> File:
        """Keep what was written to `content` as a file. Raises OSError; the content of a file whose
        `id_` is given stays there then, to be tried again."""
        id_ = id_ or f"file-{uuid.uuid4().hex}"
        now = int(time.time())
        content.replace(self.path(id_))
        size = self.path(id_).stat().st_size
        file = File(id_, size, now, now + self.bounds.seconds, filename, purpose, owner=owner)
        before = sum(known.bytes for known in self.records.all() if known.id == id_)
        try:
            self.records.put(file)
        except OSError:
            if content != self.path(id_):
                self.path(id_).unlink()
            raise
        self._forget(content)
        self._bytes[owner] += size - before
        return file

    def delete(self, id_: str) -> None:
        file = self.records.get(id_)
        self.records.drop(id_)
        self._bytes[file.owner] -= file.bytes
        self.path(id_).unlink(missing_ok=True)

    def forget_unknown(self, used: set[str]) -> None:
        """Delete contents that no record is of, but none that is `used`: a server ended before it
        could keep them."""
        known = {file.id for file in self.records.all()} | used
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in known and path.is_file():
                path.unlink()

    def forget_old(self, used: set[str]) -> None:
        """Delete files whose time is over, but none that is `used`."""
        now = time.time()
        for file in self.records.all():
            if file.expires_at <= now and file.id not in used:
                self.delete(file.id)
