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
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rootlace.runtime.gateway.state.kept import Kept, KeptSession
from rootlace.runtime.gateway.state.log_file import Damage, LogFile, read_log
from rootlace.runtime.gateway.state.records import Begun, Ended, Record
from rootlace.wire.errors import InvalidRequest

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
