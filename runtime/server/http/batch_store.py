"""Storage of batches and of their files, within bounds."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec

from rootlace.runtime.server.full_disk import FULL
from rootlace.runtime.server.http.errors import InvalidParameter, NotFound
from rootlace.runtime.server.server_state import kept_for_others
from rootlace.wire.errors import InvalidRequest, Overloaded, RootlaceError

# Batch --------------------------------------------------------------------------------------------


UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class Counts(msgspec.Struct):
    """Counts of a batch's rows."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def all_done(self) -> bool:
        return self.completed + self.failed == self.total


class Batch(msgspec.Struct):
    """OpenAI's batch object."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    request_counts: Counts = msgspec.field(default_factory=Counts)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: str = "batch"
    owner: str = ""

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED

    @property
    def result_ids(self) -> tuple[str, str]:
        """Return the ids of the files of good answers and of errors."""
        hexes = self.id.removeprefix("batch_")
        return f"file-{hexes}-output", f"file-{hexes}-errors"

    def enter(self, status: str) -> None:
        """Go on to `status`, and note the time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def fail(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        """End the batch as failed, with the faulty `line` of the input and field."""
        self.enter("failed")
        data = [{"code": code, "message": message, "line": line, "param": param}]
        self.errors = {"object": "list", "data": data}


# Paging -------------------------------------------------------------------------------------------


class Identified(Protocol):
    """Object in a list."""

    id: str


R = TypeVar("R", bound=Identified)

MAX_PAGE = 10_000


class PageQuery(msgspec.Struct):
    """Page of a list: at most `limit` records behind the record `after`. The latest come first, or
    last with `order=asc`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] | msgspec.UnsetType = msgspec.UNSET
    order: Literal["asc", "desc"] = "desc"
    after: str = ""


class Listing(msgspec.Struct, Generic[R]):
    """Page of a list."""

    data: list[R]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class Deleted(msgspec.Struct):
    """Deleted record."""

    id: str
    object: str
    deleted: bool = True


def page(query: PageQuery, records: Sequence[R], limit: int) -> Listing[R]:
    """Return a page of `records` (ordered by time), `limit` long unless the query says
    otherwise."""
    ordered = list(records) if query.order == "asc" else list(reversed(records))
    if query.after:
        ids = [record.id for record in ordered]
        if query.after not in ids:
            raise InvalidParameter("after", f"after: {query.after!r} is not in the list")
        ordered = ordered[ids.index(query.after) + 1 :]
    shown = ordered[: query.limit or limit]
    return Listing(
        data=shown,
        has_more=len(ordered) > len(shown),
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )


# Disk ---------------------------------------------------------------------------------------------
#
# Disk access of files and batches: nobody else may read them, and the disk may be full.


log = logging.getLogger(__name__)


class DiskFull(RootlaceError):
    """Full disk of the server: a client's data cannot be kept."""

    code = "disk_full"
    http_status = 507


@contextmanager
def space_needed() -> Iterator[None]:
    """Raise DiskFull where the block finds no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.error("nothing can be kept: %s", error)
        raise DiskFull("the server's disk is full: nothing was kept; try again later") from error


def private(path: str, flags: int) -> int:
    """Open a file for `open`; a new file is readable by the server alone."""
    return os.open(path, flags, 0o600)


# Records ------------------------------------------------------------------------------------------
#
# Records kept in a folder, one JSON file each, and in memory.


class Record(Protocol):
    """Record with an id, a time, and an owner: the name of an API key, "" for the operator's."""

    id: str
    created_at: int
    owner: str


RecordType = TypeVar("RecordType", bound=Record)

_NEW = ".new"


class Records(Generic[RecordType]):
    """Records by id, oldest first. Only stored ids are ever made into paths."""

    def __init__(self, folder: Path, kind: type[RecordType], noun: str) -> None:
        self._folder = folder
        self._noun = noun
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # readable by nobody else, even if it existed before
        for path in folder.glob(f"{noun}[-_]*{_NEW}"):  # cut off by the end of a server
            path.unlink()
        found = [
            msgspec.json.decode(path.read_bytes(), type=kind) for path in folder.glob("*.json")
        ]
        self._of = {record.id: record for record in sorted(found, key=lambda r: r.created_at)}

    def get(self, id_: str, param: str | None = None) -> RecordType:
        """Return a record. Raises NotFound about the field `param`."""
        if id_ not in self._of:
            raise self.missing(id_, param)
        return self._of[id_]

    def missing(self, id_: str, param: str | None = None) -> NotFound:
        return NotFound(f"there is no {self._noun} {id_!r}", param)

    def all(self) -> list[RecordType]:
        return list(self._of.values())

    def put(self, record: RecordType) -> None:
        """Store the record as it is now; a crash leaves the old or the new one, whole. Raises
        OSError, and keeps the old one then."""
        path = self._path(record.id)
        new = path.with_suffix(_NEW)
        try:
            with open(new, "wb", opener=private) as file:
                file.write(msgspec.json.encode(record))
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._of[record.id] = record

    def drop(self, id_: str) -> None:
        self._path(id_).unlink(missing_ok=True)
        self._of.pop(id_, None)

    def _path(self, id_: str) -> Path:
        return self._folder / f"{id_}.json"


# File store ---------------------------------------------------------------------------------------


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of a folder, and its files' lifetime in seconds. The last eighth of files and bytes is
    for API keys below the mean."""

    file_bytes: int = 100 * 2**20
    total_bytes: int = 2 * 2**30
    files: int = 2000
    seconds: int = 30 * 24 * 3600


class File(msgspec.Struct):
    """OpenAI's file object, as stored and as shown."""

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
"""Names of contents: the folder may hold files of others."""


class FileStore:
    """Files of a folder: `NAME.json` describes the content `NAME`."""

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        self.bounds = bounds
        self.records = Records(folder, File, "file")
        self._folder = folder
        self._bytes: Counter[str] = Counter()
        """Bytes by owner, of files being written too."""
        for file in self.records.all():
            self._bytes[file.owner] += file.bytes
        self._writing: dict[Path, tuple[str, int]] = {}

    def path(self, id_: str) -> Path:
        """Return the path of a file's content; `id_` must be made by this server."""
        return self._folder / id_

    def new_upload(self, owner: str) -> Path:
        """Return a path for a file being sent, which counts until it is added or dropped. Raises
        Overloaded if there are too many files."""
        owners = Counter(file.owner for file in self.records.all())
        owners.update(owner for owner, _ in self._writing.values())
        count, taken, limit = owners.get(owner, 0), owners.total(), self.bounds.files
        if taken >= limit:
            raise Overloaded(f"{limit} files are kept at most: delete some")
        if owner and kept_for_others(count, len(owners), taken, limit):
            raise Overloaded(
                f"this API key has {count} files, the last of {limit} are for others: delete some"
            )
        content = self._folder / f"upload-{uuid.uuid4().hex}"
        self._writing[content] = owner, 0
        return content

    def grow(self, content: Path, owner: str, size: int) -> None:
        """Count `size` bytes of `content` before they are written. Raises Overloaded if there is no
        room for them."""
        had = self._writing.get(content, (owner, 0))[1]
        taken, limit, more = self._bytes.total(), self.bounds.total_bytes, size - had
        held, owners = self._bytes[owner], sum(map(bool, self._bytes.values()))
        if taken + more > limit:
            raise Overloaded(f"files of {limit >> 20} MiB are kept at most: delete some")
        if owner and kept_for_others(held, owners, taken, limit, more):
            raise Overloaded(
                f"this API key has files of {held >> 20} MiB, the last of {limit >> 20} are for "
                "others: delete some"
            )
        self._writing[content] = owner, size
        self._bytes[owner] += more

    def drop(self, content: Path) -> None:
        """Delete a file being written, unless it was added."""
        self._forget(content)
        content.unlink(missing_ok=True)

    def _forget(self, content: Path) -> None:
        owner, size = self._writing.pop(content, ("", 0))
        self._bytes[owner] -= size

    def add(self, content: Path, filename: str, purpose: str, owner: str, id_: str = "") -> File:
        """Make a file of `content`. Raises OSError; with an `id_`, the content stays then for
        another attempt."""
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
        """Delete contents without a record, left by an ended server, except `used` ones."""
        known = {file.id for file in self.records.all()} | used
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in known and path.is_file():
                path.unlink()

    def forget_old(self, used: set[str]) -> None:
        """Delete expired files, except `used` ones."""
        now = time.time()
        for file in self.records.all():
            if file.expires_at <= now and file.id not in used:
                self.delete(file.id)


# Storage ------------------------------------------------------------------------------------------
#
# The folder of `--files`: files and batches, for one server at a time.


# Most ended batches; beyond that, the oldest of the key with most are deleted.
MAX_BATCHES = 1000


class Storage:
    """Folder of files and batches. Raises InvalidRequest if the folder cannot be used."""

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open(folder / "lock", "wb", opener=private)  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = FileStore(folder / "files", bounds)
            self.batches = Records(folder / "batches", Batch, "batch")
            self.forget_old()
            unfinished = (batch for batch in self.batches.all() if batch.unfinished)
            self.files.forget_unknown({id_ for batch in unfinished for id_ in batch.result_ids})
        except BlockingIOError:
            raise InvalidRequest(f"{folder} is used by another server; give it its own") from None
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(f"{folder} cannot keep files: {error}") from error

    def close(self) -> None:
        self._lock.close()

    def forget_old(self) -> None:
        """Delete expired files, and the oldest batches if there are too many."""
        batches = self.batches.all()
        ended = [batch for batch in batches if not batch.unfinished]
        owners = Counter(batch.owner for batch in ended)
        for _ in range(len(ended) - MAX_BATCHES):
            ((most, _),) = owners.most_common(1)
            oldest = next(batch for batch in ended if batch.owner == most)
            ended.remove(oldest)
            owners[most] -= 1
            self.batches.drop(oldest.id)
        self.files.forget_old({b.input_file_id for b in batches if b.unfinished})
