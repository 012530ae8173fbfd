"""The folder of `--state`: a log of what programs' branches became, and its beginning in short.

Records go to `programs-N.log`. When that is large, `programs-(N+1).log` goes on, and a thread
writes `programs-(N+1).base`, which amounts to all before it. What is read at a start is the last
base and the logs from its number on, up to a number that is missing: one is left out where records
before a log were not written, for the disk was full. Such a log counts only with its base.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import struct
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import msgspec

from rootlace.runtime.server.records import (
    Begun,
    Emitted,
    Ended,
    Error,
    Finished,
    Grown,
    Heard,
    Opened,
    Quoted,
    Record,
    Segment,
    Told,
    decode,
)
from rootlace.runtime.server.records import encode as records_encode
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Done, Event, encode

# Kept ---------------------------------------------------------------------------------------------
#
# What records amount to: the branches of each client, and the answers that it may not have.


@dataclass
class KeptBranch:
    """`ids` are segments of int32; a fork shares those of its parent."""

    opened: Opened
    ids: list[bytes] = field(default_factory=list)
    pending: tuple[Piece, ...] = ()
    begin: bool | None = None
    gained: list[Piece | bytes] = field(default_factory=list)
    paid: int = 0
    broken: Error | None = None


@dataclass
class KeptSession:
    """One client. `answers` are frames by operation, which it has not said that it has; `told` and
    `quoted` are about operations that have not ended."""

    begun: Begun
    branches: dict[int, KeptBranch] = field(default_factory=dict)
    answers: dict[int, bytes] = field(default_factory=dict)
    told: dict[int, list[Told]] = field(default_factory=dict)
    quoted: dict[int, dict[int, Quoted]] = field(default_factory=dict)
    heard: int = 0
    """So many answers the client has."""
    sent: deque[int] = field(default_factory=deque)
    """The operations whose answers it was sent behind those."""
    detached: float | None = None
    """When its connection was lost; None while it has one. Not in the records."""

    def apply(self, record: Record) -> None:
        """Raises KeyError for a record about what there is not."""
        if isinstance(record, Emitted):
            self.sent.append(record.op)
        elif isinstance(record, Told):
            self.told.setdefault(record.op, []).append(record)
        elif isinstance(record, Quoted):
            self.quoted.setdefault(record.op, {})[record.at] = record
        elif isinstance(record, Finished):
            self._finish(record)
        elif isinstance(record, Opened):
            self._open(record)
        elif isinstance(record, Heard):
            self._hear(record)

    def grow(self, record: Grown, ids: list[bytes]) -> None:
        branch = self.branches[record.branch]
        branch.ids += ids
        branch.pending, branch.begin, branch.paid = record.pending, record.begin, record.paid
        branch.gained += record.gained

    def _open(self, record: Opened) -> None:
        branch = KeptBranch(record)
        if record.parent is not None:
            parent = self.branches[record.parent]
            branch.ids = parent.ids[:]
            branch.pending, branch.begin = parent.pending, parent.begin
            done: list[Event] = [Done(record.op)]
            self.answers[record.op] = encode(done)
        self.branches[record.branch] = branch

    def _finish(self, record: Finished) -> None:
        if record.op:
            self.answers[record.op] = record.event
            self.told.pop(record.op, None)
            self.quoted.pop(record.op, None)
        if record.branch is not None:
            self.branches[record.branch].broken = record.broken
            if record.closed:
                del self.branches[record.branch]

    def _hear(self, record: Heard) -> None:
        while self.heard < record.count and self.sent:
            self.answers.pop(self.sent.popleft(), None)
            self.heard += 1
        self.heard = max(self.heard, record.count)
        if record.resumed:
            self.sent.clear()

    def num_bytes(self) -> int:
        """About what it has in memory; segments that branches share count for each."""
        ids = (one for branch in self.branches.values() for one in branch.ids)
        told = (one.update for parts in self.told.values() for one in parts)
        return 512 + sum(map(len, ids)) + sum(map(len, self.answers.values())) + sum(map(len, told))

    def join_segments(self) -> None:
        """Make one of those that stand side by side in one branch and in no other."""
        branches = self.branches.values()
        holders = Counter(id(one) for branch in branches for one in branch.ids)
        for branch in branches:
            if len(branch.ids) < 2:
                continue
            runs = groupby(branch.ids, lambda one: holders[id(one)] == 1)
            branch.ids = [one for own, run in runs for one in ([b"".join(run)] if own else run)]

    def dump(self, segments: dict[int, int]) -> Iterator[Record]:
        """Records that amount to it. `segments` numbers those that were given already, by `id`."""
        number = self.begun.session
        yield self.begun
        for key, branch in self.branches.items():
            for ids in branch.ids:
                if id(ids) not in segments:
                    segments[id(ids)] = len(segments)
                    yield Segment(0, segments[id(ids)], ids)
            numbers = tuple(segments[id(ids)] for ids in branch.ids)
            opened = branch.opened
            yield Opened(
                number,
                key,
                opened.op,
                opened.program,
                opened.namespace,
                opened.adapter,
                opened.private,
            )
            gained = tuple(branch.gained)
            yield Grown(number, key, numbers, branch.pending, branch.begin, gained, branch.paid)
            if branch.broken is not None:
                yield Finished(number, key, 0, b"", branch.broken)
        for op, event in self.answers.items():
            yield Finished(number, None, op, event)
        for updates in self.told.values():
            yield from updates
        for quotes in self.quoted.values():
            yield from quotes.values()
        yield Heard(number, self.heard)
        for op in self.sent:
            yield Emitted(number, op)


class Kept:
    """All clients, by their numbers."""

    def __init__(self) -> None:
        self.sessions: dict[int, KeptSession] = {}
        self._segments: dict[int, bytes] = {}

    def apply(self, record: Record) -> None:
        """Raises KeyError for a record about what there is not."""
        if isinstance(record, Segment):
            self._segments[record.number] = record.ids
        elif isinstance(record, Begun):
            self.sessions[record.session] = KeptSession(record)
        elif isinstance(record, Ended):
            self.sessions.pop(record.session, None)
        elif isinstance(record, Grown):
            ids = record.ids
            found = [ids] if isinstance(ids, bytes) else [self._segments[one] for one in ids]
            self.sessions[record.session].grow(record, [one for one in found if one])
        else:
            self.sessions[record.session].apply(record)

    def forget_segments(self) -> None:
        """No more numbers of segments will come."""
        self._segments.clear()

    def dump(self) -> list[Record]:
        """Records that amount to all of it."""
        segments: dict[int, int] = {}
        for session in self.sessions.values():
            session.join_segments()
        return [record for session in self.sessions.values() for record in session.dump(segments)]


# Log file -----------------------------------------------------------------------------------------
#
# Files of records: a header, then batches of records, each with its length and its checksum.
#
# A file whose end is missing, or is damaged, is read up to there: a batch counts as a whole or not
# at all.


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
        data = records_encode(records)
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


# Journal ------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""So much is lost at most when the power fails. A process that dies loses nothing it has told."""
RETRY_SECONDS = 2.0
"""How often writing is tried again where the disk is full."""
MIN_LOG_BYTES = 4 << 20
RECLAIM_SECONDS = 600.0
"""For so long what a client had is kept for its return."""
MAX_DETACHED = 1024
MAX_DETACHED_BYTES = 256 << 20
"""Of what absent clients have in memory, about."""
_BATCH_RECORDS = 64
"""Of a base; the interpreter is held while a batch is encoded."""


class Journal:
    """The folder's only user. Raises InvalidRequest if it cannot be used, or another server does.

    `later(seconds, call)` is the event loop's: without it nothing is synced before `close`.
    """

    def __init__(
        self,
        folder: Path,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        min_log_bytes: int = MIN_LOG_BYTES,
    ) -> None:
        self._folder = folder
        self._later = later
        self._clock = clock
        self._min_log_bytes = min_log_bytes
        self._pending: list[Record] = []
        self._log: LogFile | None = None
        self._retry_at = 0.0
        """Not before that is a base written."""
        self._gap = False
        """Whether the files lack something that is in memory, which was told."""
        self._needs_base = False
        """Whether the log counts only with its base, which is not there yet."""
        self._sync_due = False
        self._base: Future[int] | None = None
        """The base that is being written."""
        self._base_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (folder / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._kept, self._number = _load(folder)
            for cut_off in folder.glob("programs-*.new"):  # of a server that was killed meanwhile
                cut_off.unlink()
        except BlockingIOError:
            raise InvalidRequest(f"{folder} is used by another server; give it its own") from None
        except OSError as error:
            raise InvalidRequest(f"{folder} cannot keep state: {error}") from error
        self._last_session = max(self._kept.sessions, default=0)
        now = clock()
        self._of_key: dict[str, KeptSession] = {}
        for session in self._kept.sessions.values():
            session.detached = now
            self._of_key[session.begun.key] = session
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        if self._begin():
            try:
                self._base_bytes = self._write_base(self._number, self._kept.dump())
            except OSError as error:
                self._stop(error)

    def find(self, key: str) -> KeptSession | None:
        """The client of this name."""
        return self._of_key.get(key)

    def begin(self, key: str, owner: str, model: str = "") -> KeptSession:
        """A new client."""
        if (known := self.find(key)) is not None:
            self.end(known)
        self._last_session += 1
        self.add(Begun(self._last_session, key, owner, model))
        session = self._of_key[key] = self._kept.sessions[self._last_session]
        return session

    def end(self, session: KeptSession) -> None:
        """Nothing of it is wanted any more."""
        if self._of_key.get(session.begun.key) is session:
            del self._of_key[session.begun.key]
            self.add(Ended(session.begun.session))

    def detach(self, session: KeptSession) -> None:
        """Its client is gone, and may come back."""
        session.detached = self._clock()

    def forget_old(self) -> None:
        """Forget those who do not come back; and while they are too many, or have too much, the
        first that went of the owner who has most: so nobody pushes out others' clients."""
        absent: dict[str, deque[tuple[int, KeptSession]]] = {}
        gone = [(s.detached, s) for s in self._of_key.values() if s.detached is not None]
        for since, session in sorted(gone, key=lambda one: one[0]):
            if self._clock() - since > RECLAIM_SECONDS:
                self.end(session)
            else:
                mine = absent.setdefault(session.begun.owner, deque())
                mine.append((session.num_bytes(), session))
        shares = {owner: _share(sessions) for owner, sessions in absent.items()}
        while sum(shares.values()) > 1:
            most = max(shares, key=shares.__getitem__)
            self.end(absent[most].popleft()[1])
            shares[most] = _share(absent[most])
        self.flush()
        self._tend()

    def add(self, record: Record) -> None:
        """Keep it; `flush` writes it."""
        self._kept.apply(record)
        self._pending.append(record)

    def flush(self) -> None:
        """Write what was added: before anybody is told of it. Where the disk is full, say so once
        and go on."""
        pending = self._pending
        if not pending:
            return
        self._pending = []
        if self._log is not None:
            try:
                self._log.append(pending)
            except OSError as error:
                self._stop(error)
                return
            if not self._sync_due and self._later is not None:
                self._sync_due = True
                self._later(SYNC_SECONDS, self._sync)
        self._tend()

    def close(self) -> None:
        """Write everything, and let another server have the folder."""
        self.flush()
        self._thread.shutdown()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.sync()
            self._log.close()
            self._log = None
        self._lock.close()

    # ------------------------------------------------------------ files

    def _tend(self) -> None:
        """Look at the base that was being written, and have another one written if it is time."""
        if self._base is not None:
            if not self._base.done():
                return
            written, self._base = self._base, None
            self._written(written)
        large = max(self._min_log_bytes, 2 * self._base_bytes)
        due = self._log is None or self._log.size > large
        # What was kept in memory while the disk was full is in the base.
        if due and self._clock() >= self._retry_at and self._begin():
            self._base = self._thread.submit(self._write_base, self._number, self._kept.dump())

    def _written(self, base: Future[int]) -> None:
        error = base.exception()
        if error is None:
            self._needs_base = False
            self._base_bytes = base.result()
            if self._gap and self._log is not None:
                self._gap = False
                log.warning("%s: programs are kept again", self._folder)
        elif self._gap and isinstance(error, OSError):
            self._stop(error)
        else:  # the older files are still there, and the log goes on
            log.error("%s: the log was not shortened: %s", self._folder, error)
            self._retry_at = self._clock() + RETRY_SECONDS

    def _begin(self) -> bool:
        """Begin a new log. A number is left out where it has nothing to go on from but its base."""
        self._number += 1 + self._gap
        self._needs_base = self._gap
        try:
            new = LogFile(self._path("log"))
        except OSError as error:
            self._stop(error)
            return False
        if self._log is not None:
            self._log.close()
        self._log = new
        return True

    def _stop(self, error: OSError) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._needs_base and self._base is None:
            with contextlib.suppress(OSError):
                self._path("log").unlink(missing_ok=True)
        if not self._gap:
            self._gap = True
            log.error(
                "%s: programs are not kept any more, and would not survive a restart: %s",
                self._folder,
                error,
            )
        self._retry_at = self._clock() + RETRY_SECONDS

    def _write_base(self, number: int, records: list[Record]) -> int:
        """Returns its size in bytes; what it replaces is gone then."""
        path = self._folder / f"programs-{number:08d}.base"
        new = LogFile(path.with_suffix(".new"))
        try:
            for at in range(0, len(records), _BATCH_RECORDS):
                new.append(records[at : at + _BATCH_RECORDS])
            new.sync()
        except OSError:
            path.with_suffix(".new").unlink(missing_ok=True)  # it takes what room there is
            raise
        finally:
            new.close()
        path.with_suffix(".new").replace(path)
        _sync_folder(self._folder)
        for file in _files(self._folder):
            if _number_of(file) < number:
                file.unlink(missing_ok=True)
        return new.size

    def _sync(self) -> None:
        self._sync_due = False
        if self._log is not None:
            # A descriptor of its own: the log may be closed meanwhile.
            self._thread.submit(_sync_descriptor, os.dup(self._log.descriptor))

    def _path(self, kind: str) -> Path:
        return self._folder / f"programs-{self._number:08d}.{kind}"


def _share(sessions: Collection[tuple[int, KeptSession]]) -> float:
    """How much of what absent clients may have these have, by number or by bytes."""
    size = sum(size for size, _ in sessions)
    return max(len(sessions) / MAX_DETACHED, size / MAX_DETACHED_BYTES)


def _load(folder: Path) -> tuple[Kept, int]:
    """What the folder keeps, and the highest number of a file. What cannot be read is told, and
    what is behind it is not looked at. Raises OSError, and InvalidRequest for another version."""
    files = sorted(_files(folder), key=_number_of)
    last = _number_of(files[-1]) if files else 0
    bases = [file for file in files if file.suffix == ".base"]
    kept = Kept()
    for path in _readable(bases[-1]) if bases else ():
        try:
            for batch in read_log(path):
                for record in batch:
                    kept.apply(record)
        except (Damage, KeyError) as error:
            is_base = path.suffix == ".base"
            if is_base:
                log.error("%s: all programs are lost, %s is left: %s", folder, path.stem, error)
                path.rename(path.with_suffix(".damaged"))
                return Kept(), last
            log.warning("%s: what programs did later is lost: %s", folder, error)
            break
        finally:
            kept.forget_segments()
    return kept, last


def _readable(base: Path) -> Iterator[Path]:
    """A base and the logs that go on from it, or from one another."""
    yield base
    for number in itertools.count(_number_of(base)):
        path = base.with_name(f"programs-{number:08d}.log")
        if not path.exists():
            return
        yield path


def _files(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.glob("programs-*")
        if path.suffix in (".base", ".log") and path.stem.partition("-")[2].isdigit()
    ]


def _number_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _sync_descriptor(descriptor: int) -> None:
    try:
        with contextlib.suppress(OSError):
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
