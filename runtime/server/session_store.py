"""The folder of `--state`: a database of what programs' sessions hold, for the next server.

A session of a client, in memory and as rows of `programs.sqlite`:

    Client "k3f…"            the client has the first 7 answers
      KeptBranch 1           segments 12, 15; text that is not tokenized yet
      KeptBranch 2           segments 12, 19; forked when branch 1 held segment 12 alone
      Segment 12, 15, 19     token ids
      Answer 8, Sent 8       a terminal event, which is on its way to the client
      Told 9, Told 9         two outputs of the engine for the generation that runs

Memory holds what the rows hold. A change of memory marks its rows, and `flush` commits the marked
rows in one transaction. So a full disk costs nothing but time: the rows stay marked.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from rootlace.runtime.server.full_disk import Retry, connect, file_to_read, is_full, open_file
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Done, Event, encode

# Rows ---------------------------------------------------------------------------------------------
#
# Branches and operations have the client's ids, of which it uses none twice.

VERSION = 2
APPLICATION = int.from_bytes(b"Rtlc")
"""What `pragma application_id` says of a file of ours."""

Error = tuple[str, str]
"""Code and message."""


class _Row(msgspec.Struct, array_like=True, kw_only=True):
    """`place` is the row's key, in the order of creation; `session` is the key of its `Client`."""

    place: int = 0
    session: int = 0


class Client(_Row, tag=1):
    """A client gave itself the name `key`, uses the API key of `owner`, and has `heard` answers.

    `model` names the model whose token ids the client's branches hold."""

    key: str
    owner: str
    model: str = ""
    heard: int = 0


class KeptBranch(_Row, tag=2):
    """A branch that operation `op` opened. For `pending` and `begin` see `BranchState`."""

    branch: int
    op: int
    program: str = ""
    namespace: str = ""
    adapter: str = ""
    private: bool = False
    segments: list[int] = []
    """Places of the `Segment` rows. A fork shares those of its parent."""
    pending: tuple[Piece, ...] = ()
    begin: bool | None = None
    paid: int = 0
    broken: Error | None = None
    """Why every later operation fails."""


class Segment(_Row, tag=3):
    """Token ids (int32) by which `branch` grew, and the texts and ids that it gained with them."""

    branch: int
    ids: bytes = b""
    gained: tuple[Piece | bytes, ...] = ()


class Answer(_Row, tag=4):
    """The terminal event of an operation, as a frame of the wire, until the client has it."""

    op: int
    event: bytes


class Sent(_Row, tag=5):
    """The client was sent the answer to an operation, and has not said that it has it."""

    op: int


class Told(_Row, tag=6):
    """The engine's `update` (a message of its pipe) for sample `index` of a running generation."""

    op: int
    index: int
    update: bytes


class Quoted(_Row, tag=7):
    """What the `at`th quote of a running append found, or why there is nothing to find."""

    op: int
    at: int
    pieces: tuple[Piece, ...] = ()
    error: Error | None = None


Row = Client | KeptBranch | Segment | Answer | Sent | Told | Quoted

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Row)

# Sessions -----------------------------------------------------------------------------------------

SEGMENT_BYTES = 4096
"""A segment that is smaller grows in place, so that a branch has few."""


class KeptSession:
    """What a server keeps of one client. Methods raise KeyError for a branch that is not there."""

    def __init__(self, store: SessionStore, client: Client) -> None:
        self._store = store
        self.client = client
        self.branches: dict[int, KeptBranch] = {}
        self.segments: dict[int, Segment] = {}
        self.holders: Counter[int] = Counter()
        """How many branches have a segment, by its place."""
        self.answers: dict[int, Answer] = {}
        self.told: dict[int, list[Told]] = {}
        self.quoted: dict[int, dict[int, Quoted]] = {}
        self.sent: deque[Sent] = deque()
        self.sizes: dict[int, int] = {}
        """Bytes of each row."""
        self.detached: float | None = None
        """When the connection was lost; None while there is one. Not kept."""

    def add(self, row: Row) -> None:
        """Keep a new row."""
        row.session = self.client.place
        self._store.put(self, row)
        self.take(row)

    def take(self, row: Row) -> None:
        """Take a row that the file has into memory."""
        if isinstance(row, Told):
            self.told.setdefault(row.op, []).append(row)
        elif isinstance(row, Sent):
            self.sent.append(row)
        elif isinstance(row, Answer):
            self._drop(self.answers.get(row.op))
            self.answers[row.op] = row
        elif isinstance(row, Quoted):
            self.quoted.setdefault(row.op, {})[row.at] = row
        elif isinstance(row, Segment):
            self.segments[row.place] = row
        elif isinstance(row, KeptBranch):
            self.branches[row.branch] = row
            self.holders.update(row.segments)

    def open(self, branch: KeptBranch, parent: int | None = None) -> None:
        """Keep a new branch. A fork holds what `parent` holds now, and its operation succeeded."""
        if branch.branch in self.branches:
            raise KeyError(branch.branch)
        if parent is not None:
            above = self.branches[parent]
            branch.segments = above.segments[:]
            branch.pending, branch.begin = above.pending, above.begin
            done: list[Event] = [Done(branch.op)]
            self.add(Answer(branch.op, encode(done)))
        self.add(branch)

    def grow(
        self,
        number: int,
        ids: bytes,
        gained: tuple[Piece | bytes, ...],
        pending: tuple[Piece, ...],
        begin: bool | None,
        paid: int,
    ) -> None:
        """Add ids (int32) and what was gained to a branch. `pending`, `begin` and `paid` replace
        what the branch has."""
        branch = self.branches[number]
        if ids or gained:
            last = self.segments[branch.segments[-1]] if branch.segments else None
            if (
                last is not None
                and last.branch == number
                and self.holders[last.place] == 1
                and self.sizes[last.place] < SEGMENT_BYTES
            ):
                last.ids, last.gained = last.ids + ids, last.gained + gained
                self._store.put(self, last)
            else:
                new = Segment(number, ids, gained)
                self.add(new)
                branch.segments.append(new.place)
                self.holders[new.place] = 1
        branch.pending, branch.begin, branch.paid = pending, begin, paid
        self._store.put(self, branch)

    def finish(self, number: int, op: int, event: bytes, closed: bool) -> None:
        """Keep the terminal event of an operation of a branch, which may be closed by it."""
        branch = self.branches[number]
        self.add(Answer(op, event))
        for row in (*self.told.pop(op, ()), *self.quoted.pop(op, {}).values()):
            self._drop(row)
        if closed:
            del self.branches[number]
            self._drop(branch)
            for place in branch.segments:
                self.holders[place] -= 1
                if not self.holders[place]:
                    del self.holders[place]
                    self._drop(self.segments.pop(place))

    def break_branch(self, number: int, why: Error) -> None:
        """Every later operation of the branch will fail."""
        branch = self.branches[number]
        if branch.broken != why:
            branch.broken = why
            self._store.put(self, branch)

    def hear(self, count: int, resumed: bool = False) -> None:
        """The client has the first `count` of all answers that it was sent. Where it has `resumed`,
        the others were lost with its connection."""
        while self.client.heard < count and self.sent:
            sent = self.sent.popleft()
            self._drop(sent)
            self._drop(self.answers.pop(sent.op, None))
            self.client.heard += 1
        if resumed:
            for sent in self.sent:
                self._drop(sent)
            self.sent.clear()
        self.client.heard = max(self.client.heard, count)
        self._store.put(self, self.client)

    def num_bytes(self) -> int:
        """About what the session takes in memory."""
        return 512 + sum(self.sizes.values())

    def _drop(self, row: Row | None) -> None:
        if row is not None:
            del self.sizes[row.place]
            self._store.remove([row.place])


# Store --------------------------------------------------------------------------------------------

SYNC_SECONDS = 1.0
RECLAIM_SECONDS = 600.0
"""How long what an absent client had is kept for its return."""
MAX_DETACHED = 1024
MAX_DETACHED_BYTES = 256 << 20
"""Bounds of what absent clients have."""

# The system has what is committed, so the death of a process loses nothing. The disk has what was
# synced: a power cut may lose the commits since the last checkpoint, which a thread makes a second
# after the first of them. The file is whole in either case.
_SETTINGS = """
pragma journal_mode = wal;
pragma synchronous = normal;
pragma wal_autocheckpoint = 4096;
pragma journal_size_limit = 16777216;
pragma secure_delete = fast;
pragma incremental_vacuum;
"""
_TABLES = f"""
pragma auto_vacuum = incremental;
begin;
create table rows (place integer primary key, checksum integer not null, row blob not null);
pragma application_id = {APPLICATION};
pragma user_version = {VERSION};
commit;
"""


class SessionStore:
    """The folder's only user. Raises InvalidRequest where the folder cannot be used, another server
    uses it, or its file is damaged or foreign.

    `later(seconds, call)` is the event loop's: without it the file is synced by `close` alone.
    """

    def __init__(
        self,
        folder: Path,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / "programs.sqlite"
        self._later = later
        self._clock = clock
        self._changed: dict[int, bytes | None] = {}
        """Rows to be committed, by place; None for one to be deleted."""
        self._retry = Retry(self._path, "programs", clock)
        self._sync_due = False
        self._sessions: dict[int, KeptSession] = {}
        self._last_place = 0
        self._held = contextlib.ExitStack()
        """What `close` closes: the folder's lock, and the file."""
        self._lock: IO[bytes] | None = None
        self._file: sqlite3.Connection | None = None
        """None where the disk was too full to open it."""
        try:
            self._take_folder(read=True)
        except BaseException:
            self._held.close()
            raise
        now = clock()
        self._of_key: dict[str, KeptSession] = {}
        for session in self._sessions.values():
            session.detached = now
            self._of_key[session.client.key] = session
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    def find(self, key: str) -> KeptSession | None:
        """The session of the client of this name."""
        return self._of_key.get(key)

    def begin(self, key: str, owner: str, model: str = "") -> KeptSession:
        """Keep a new client."""
        if (known := self.find(key)) is not None:
            self.end(known)
        client = Client(key, owner, model)
        session = self._of_key[key] = KeptSession(self, client)
        self.put(session, client)
        return session

    def end(self, session: KeptSession) -> None:
        """Delete a session: nobody will ask for it."""
        if self._of_key.get(session.client.key) is session:
            del self._of_key[session.client.key]
            self.remove(session.sizes)

    def detach(self, session: KeptSession) -> None:
        """The client is gone, and may come back."""
        session.detached = self._clock()

    def forget_old(self) -> None:
        """Forget clients that do not come back. While the others are too many, or have too much,
        forget the first that went of the owner who has most: nobody pushes out others' clients."""
        absent: dict[str, deque[tuple[int, KeptSession]]] = {}
        gone = [(s.detached, s) for s in self._of_key.values() if s.detached is not None]
        for since, session in sorted(gone, key=lambda one: one[0]):
            if self._clock() - since > RECLAIM_SECONDS:
                self.end(session)
            else:
                mine = absent.setdefault(session.client.owner, deque())
                mine.append((session.num_bytes(), session))
        shares = {owner: _share(sessions) for owner, sessions in absent.items()}
        while sum(shares.values()) > 1:
            most = max(shares, key=shares.__getitem__)
            self.end(absent[most].popleft()[1])
            shares[most] = _share(absent[most])
        self.flush()

    def put(self, session: KeptSession, row: Row) -> None:
        """Mark a new or changed row."""
        if not row.place:
            self._last_place += 1
            row.place = self._last_place
        data = self._changed[row.place] = _encoder.encode(row)
        session.sizes[row.place] = len(data)

    def remove(self, places: Iterable[int]) -> None:
        """Mark rows that are to be deleted."""
        self._changed.update(dict.fromkeys(places))

    def flush(self) -> None:
        """Commit what changed: to be called before a client is told of it. Where the disk is full,
        log so once and go on; the changes wait."""
        if not self._changed or not self._retry.due:
            return
        try:
            if self._file is None:
                self._take_folder(read=False)
            if self._file is None:
                return
            self._commit(self._file)
        except (sqlite3.Error, InvalidRequest) as error:
            self._retry.failed(error)
            return
        self._changed.clear()
        self._retry.succeeded()
        if not self._sync_due and self._later is not None:
            self._sync_due = True
            self._later(SYNC_SECONDS, self._sync)

    def close(self) -> None:
        """Commit everything, and let another server have the folder."""
        self._retry.hurry()
        self.flush()
        self._thread.shutdown()
        self._held.close()

    def _take_folder(self, read: bool) -> None:
        """Lock the folder and open its file; `read` what the file has. Where the disk is too full
        for that, do so later: an old file is read all the same. Raises InvalidRequest."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._lock is None:
                with contextlib.ExitStack() as opened:
                    lock = opened.enter_context((folder / "lock").open("wb"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._lock = lock
                    self._held.push(opened.pop_all())
            self._file = open_file(self._path, self._open, self._retry)
            if self._file is not None:
                self._held.callback(self._file.close)
            if read:
                with file_to_read(self._path, self._file) as file:
                    if file is not None:
                        self._read(file)
        except BlockingIOError:
            raise InvalidRequest(f"{folder} is used by another server; give it its own") from None
        except (sqlite3.OperationalError, OSError) as error:
            if isinstance(error, sqlite3.Error) or not is_full(error, folder):
                raise InvalidRequest(f"{self._path} cannot keep state: {error}") from error
            self._retry.failed(error)
        except (
            sqlite3.Error,
            msgspec.DecodeError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:
            raise InvalidRequest(
                f"{self._path} is damaged, or not a file of Rootlace: {error}; move it away to"
                " start without what it has"
            ) from error

    def _open(self, file: sqlite3.Connection) -> None:
        """Raises InvalidRequest for another version, ValueError or sqlite3.Error for damage."""
        ask = file.execute
        (version,), (application,) = (
            ask(f"pragma {name}").fetchone() for name in ("user_version", "application_id")
        )
        if (version, application) == (0, 0) and not ask("select * from sqlite_master").fetchall():
            file.executescript(_TABLES)
        elif application != APPLICATION:
            raise ValueError("it belongs to another program")
        elif version != VERSION:
            raise InvalidRequest(f"{self._path} has version {version} of the format, not {VERSION}")
        file.executescript(_SETTINGS)
        (state,) = ask("pragma quick_check(1)").fetchone()
        if state != "ok":
            raise ValueError(state)

    def _read(self, file: sqlite3.Connection) -> None:
        """Take the rows into memory. Raises ValueError, LookupError, TypeError, sqlite3.Error or
        msgspec.DecodeError for what was not written so."""
        for place, checksum, data in file.execute("select * from rows order by place"):
            row = _decoder.decode(data)
            if zlib.crc32(data) != checksum or row.place != place:
                raise ValueError(f"row {place} is not what was written")
            if isinstance(row, Client):
                session = self._sessions[place] = KeptSession(self, row)
            else:
                session = self._sessions[row.session]
                session.take(row)
            session.sizes[place] = len(data)
            self._last_place = place
        for session in self._sessions.values():
            if session.holders.keys() != session.segments.keys():
                raise ValueError(f"segments of client {session.client.place} are missing")

    def _commit(self, file: sqlite3.Connection) -> None:
        rows = [(p, zlib.crc32(row), row) for p, row in self._changed.items() if row is not None]
        gone = [(place,) for place, row in self._changed.items() if row is None]
        with file:  # commits, or rolls back
            file.execute("begin immediate")
            file.executemany("insert or replace into rows values (?, ?, ?)", rows)
            file.executemany("delete from rows where place = ?", gone)

    def _sync(self) -> None:
        self._sync_due = False
        self._thread.submit(_checkpoint, self._path)


def _share(sessions: Collection[tuple[int, KeptSession]]) -> float:
    """How much of what absent clients may have these have, by number or by bytes."""
    size = sum(size for size, _ in sessions)
    return max(len(sessions) / MAX_DETACHED, size / MAX_DETACHED_BYTES)


def _checkpoint(path: Path) -> None:
    """Sync the log, and move what it has into the file, while others commit. Where that fails, the
    log keeps it."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(path)) as file:
        file.execute("pragma wal_checkpoint(passive)")
