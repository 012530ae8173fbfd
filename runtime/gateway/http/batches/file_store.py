"""Files that clients sent or batches wrote, within bounds."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rootlace.runtime.gateway.http.batches.records import Records
from rootlace.wire.errors import InvalidRequest


@dataclass(frozen=True)
class Bounds:
    """What a folder may hold, and for how many seconds."""

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

    def path(self, id_: str) -> Path:
        """Where the content of a file is, or will be; `id_` is one that this server made."""
        return self._folder / id_

    def new_upload(self) -> Path:
        """Where the content of a file that is being sent can be written."""
        return self._folder / f"upload-{uuid.uuid4().hex}"

    def check_count(self) -> None:
        """Raises InvalidRequest if there are so many files that none can be sent."""
        if len(self.records.all()) >= self.bounds.files:
            raise InvalidRequest(f"{self.bounds.files} files are kept at most: delete some")

    def check_room(self, more: int) -> None:
        """Raises InvalidRequest if there is no room for `more` bytes."""
        if sum(file.bytes for file in self.records.all()) + more > self.bounds.total_bytes:
            raise InvalidRequest(
                f"files of {self.bounds.total_bytes >> 20} MiB are kept at most: delete some"
            )

    def add(self, content: Path, filename: str, purpose: str, owner: str, id_: str = "") -> File:
        """Keep what was written to `content` as a file. Raises OSError; the content of a file whose
        `id_` is given stays there then, to be tried again."""
        id_ = id_ or f"file-{uuid.uuid4().hex}"
        now = int(time.time())
        content.replace(self.path(id_))
        size = self.path(id_).stat().st_size
        file = File(id_, size, now, now + self.bounds.seconds, filename, purpose, owner=owner)
        try:
            self.records.put(file)
        except OSError:
            if content != self.path(id_):
                self.path(id_).unlink()
            raise
        return file

    def delete(self, id_: str) -> None:
        self.records.drop(id_)
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
