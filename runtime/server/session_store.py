"""Database in the folder of `--state`: the sessions of programs, kept for the next server.

A session of a client, in memory and as rows of `programs.sqlite`:

    Client "k3f…"            the client has the first 7 answers
      SavedBranch 1          segments 12, 15; text that is not tokenized yet
      SavedBranch 2          segments 12, 19; forked when branch 1 held segment 12 alone
      Segment 12, 15, 19     token ids
      Answer 8, Sent 8       a terminal event, which is on its way to the client
      Told 9, Told 9         two outputs of the engine for the generation that runs

Memory holds the same as the rows. A change in memory marks its rows, and `flush` commits the marked
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
# Branches and operations have the client's ids; a client uses no id twice.

VERSION = 2
APPLICATION = int.from_bytes(b"Rtlc")
"""`pragma application_id` of Rootlace's files."""

Error = tuple[str, str]
"""Error code and message."""


class _Row(msgspec.Struct, array_like=True, kw_only=True):
    """Row. `place` is its key, in order of creation; `session` is the key of its `Client`."""

    place: int = 0
    session: int = 0


class Client(_Row, tag=1):
    """Client named `key` by itself, with the API key of `owner` and `heard` answers. `model` names
    the model whose token ids the client's branches hold."""

    key: str
    owner: str
    model: str = ""
    heard: int = 0


class SavedBranch(_Row, tag=2):
    """Branch opened by operation `op`. For `pending` and `begin` see `SequenceState`."""

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
    """Error of the broken branch, which fails every later operation."""


class Segment(_Row, tag=3):
    """Token ids (int32) by which `branch` grew, and the texts and ids that it gained with them."""

    branch: int
    ids: bytes = b""
    gained: tuple[Piece | bytes, ...] = ()


class Answer(_Row, tag=4):
    """Terminal event of an operation, as a frame of the wire, until the client has it."""

    op: int
    event: bytes


class Sent(_Row, tag=5):
    """Answer sent to the client and not confirmed yet, by its operation."""

    op: int


class Told(_Row, tag=6):
    """Engine's `update` (a message of its pipe) for sample `index` of a running generation."""

    op: int
    index: int
    update: bytes


class Quoted(_Row, tag=7):
    """Result of quote `at` of a running append, or the error of a failed quote."""

    op: int
    at: int
    pieces: tuple[Piece, ...] = ()
    error: Error | None = None


Row = Client | SavedBranch | Segment | Answer | Sent | Told | Quoted

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Row)

# Sessions -----------------------------------------------------------------------------------------

SEGMENT_BYTES = 4096
"""Size below which a segment grows in place, so that a branch has few segments."""


class SavedSession:
    """Records of one client's session. Methods raise KeyError for an unknown branch."""

    def __init__(self, store: SessionStore, client: Client) -> None:
        self._store = store
        self.client = client
        self.branches: dict[int, SavedBranch] = {}
        self.segments: dict[int, Segment] = {}
        self.holders: Counter[int] = Counter()
        """Number of branches that have a segment, by the segment's place."""
        self.answers: dict[int, Answer] = {}
        self.told: dict[int, list[Told]] = {}
        self.quoted: dict[int, dict[int, Quoted]] = {}
        self.sent: deque[Sent] = deque()
        self.sizes: dict[int, int] = {}
        """Bytes of each row, by place."""
        self.detached: float | None = None
        """Time when the connection was lost; None while connected. Not in the file."""

    def add(self, row: Row) -> None:
        """Add a new row."""
        row.session = self.client.place
        self._store.put(self, row)
        self.take(row)

    def take(self, row: Row) -> None:
        """Take a row of the file into memory."""
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
        elif isinstance(row, SavedBranch):
            self.branches[row.branch] = row
            self.holders.update(row.segments)

    def open(self, branch: SavedBranch, parent: int | None = None) -> None:
        """Add a new branch. A fork copies the state of `parent`, and its `Open` succeeded."""
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
        """Add ids (int32) and gained pieces to a branch. `pending`, `begin` and `paid` replace the
        branch's values."""
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
        """Add the terminal event of a branch's operation; `closed` removes the branch."""
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
        """Record the error that fails every later operation of the branch."""
        branch = self.branches[number]
        if branch.broken != why:
            branch.broken = why
            self._store.put(self, branch)

    def hear(self, count: int, resumed: bool = False) -> None:
        """Drop the first `count` answers, which the client has. With `resumed`, the client lost the
        other sent ones with its connection: these count as unsent."""
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
        """Estimate the session's memory in bytes."""
        return 512 + sum(self.sizes.values())

    def _drop(self, row: Row | None) -> None:
        if row is not None:
            del self.sizes[row.place]
            self._store.remove([row.place])


# Store --------------------------------------------------------------------------------------------

SYNC_SECONDS = 1.0
RECLAIM_SECONDS = 600.0
"""Time that an absent client's session is kept for its return."""
MAX_DETACHED = 1024
MAX_DETACHED_BYTES = 256 << 20
"""Bounds on the sessions of absent clients, in number and bytes."""

# A commit reaches the operating system, so the death of a process loses nothing. Only a sync
# reaches the disk: a power cut may lose the commits since the last checkpoint. A thread makes a
# checkpoint a second after the first commit. The file is whole in either case.
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
    """Only user of the folder. Raises InvalidRequest where the folder cannot be used, another
    server uses it, or its file is damaged or foreign.

    `later(seconds, call)` is the event loop's; without it, only `close` syncs the file.
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
        """Rows to commit, by place; None deletes a row."""
        self._retry = Retry(self._path, "programs", clock)
        self._sync_due = False
        self._sessions: dict[int, SavedSession] = {}
        self._last_place = 0
        self._held = contextlib.ExitStack()
        """Resources that `close` frees: the folder's lock, and the file."""
        self._lock: IO[bytes] | None = None
        self._file: sqlite3.Connection | None = None
        """None while the disk is too full to open the file."""
        try:
            self._take_folder(read=True)
        except BaseException:
            self._held.close()
            raise
        now = clock()
        self._of_key: dict[str, SavedSession] = {}
        for session in self._sessions.values():
            session.detached = now
            self._of_key[session.client.key] = session
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    def find(self, key: str) -> SavedSession | None:
        """Return the session of the client named `key`."""
        return self._of_key.get(key)

    def begin(self, key: str, owner: str, model: str = "") -> SavedSession:
        """Begin a new client's session; an old one of that name ends."""
        if (known := self.find(key)) is not None:
            self.end(known)
        client = Client(key, owner, model)
        session = self._of_key[key] = SavedSession(self, client)
        self.put(session, client)
        return session

    def end(self, session: SavedSession) -> None:
        """Delete a session."""
        if self._of_key.get(session.client.key) is session:
            del self._of_key[session.client.key]
            self.remove(session.sizes)

    def detach(self, session: SavedSession) -> None:
        """Note that the client has gone and may come back."""
        session.detached = self._clock()

    def forget_old(self) -> None:
        """Forget clients that are away for too long. While the rest exceed the bounds, forget the
        oldest of the owner with the largest share: no owner displaces others' clients."""
        absent: dict[str, deque[tuple[int, SavedSession]]] = {}
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

    def put(self, session: SavedSession, row: Row) -> None:
        """Mark a new or changed row."""
        if not row.place:
            self._last_place += 1
            row.place = self._last_place
        data = self._changed[row.place] = _encoder.encode(row)
        session.sizes[row.place] = len(data)

    def remove(self, places: Iterable[int]) -> None:
        """Mark rows for deletion."""
        self._changed.update(dict.fromkeys(places))

    def flush(self) -> None:
        """Commit the marked rows; called before a client learns of the changes. On a full disk, log
        it once and go on: the rows stay marked."""
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
        """Commit everything, and free the folder for another server."""
        self._retry.hurry()
        self.flush()
        self._thread.shutdown()
        self._held.close()

    def _take_folder(self, read: bool) -> None:
        """Lock the folder and open its file; `read` takes its rows into memory. If the disk is too
        full to open the file, retry later, but read an old file now. Raises InvalidRequest."""
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
        except (sqlite3.Error, msgspec.DecodeError, ValueError, LookupError, TypeError) as error:
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
        msgspec.DecodeError for damaged rows."""
        for place, checksum, data in file.execute("select * from rows order by place"):
            row = _decoder.decode(data)
            if zlib.crc32(data) != checksum or row.place != place:
                raise ValueError(f"row {place} is not what was written")
            if isinstance(row, Client):
                session = self._sessions[place] = SavedSession(self, row)
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


def _share(sessions: Collection[tuple[int, SavedSession]]) -> float:
    """Return the share of the bounds on absent clients that sessions take, by number or bytes."""
    size = sum(size for size, _ in sessions)
    return max(len(sessions) / MAX_DETACHED, size / MAX_DETACHED_BYTES)


def _checkpoint(path: Path) -> None:
    """Sync the log and move its commits into the file, beside other commits. After a failure the
    log keeps them."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(path)) as file:
        file.execute("pragma wal_checkpoint(passive)")
