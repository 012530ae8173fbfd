"""Full disks under `--state`: the server starts, logs the fault once, and retries later."""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk without room."""
RETRY_SECONDS = 2.0
"""Time between attempts to write to a full disk."""
LEAST_ROOM = 1 << 20
"""Bytes that can be written to a new file where there is room."""


class Retry:
    """Schedule of attempts to write a file; only the first failure is logged."""

    def __init__(self, path: Path, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` names the file's contents in the log."""
        self._path = path
        self._contents = what
        self._clock = clock
        self.at: float | None = None
        """Earliest time of the next attempt; None if the last attempt succeeded."""

    @property
    def due(self) -> bool:
        """Return whether writing may be tried now."""
        return self.at is None or self._clock() >= self.at

    @property
    def seconds(self) -> float:
        """Return the seconds until writing may be tried."""
        return 0.0 if self.at is None else max(self.at - self._clock(), 0.0)

    def hurry(self) -> None:
        """Allow the next attempt now."""
        if self.at is not None:
            self.at = self._clock()

    def failed(self, error: Exception) -> None:
        """Note that an attempt failed."""
        if self.at is None:
            log.error(
                "%s: %s are not kept any more, and would not survive a restart: %s",
                self._path,
                self._contents,
                error,
            )
        self.at = self._clock() + RETRY_SECONDS

    def succeeded(self) -> None:
        """Note that an attempt succeeded."""
        if self.at is not None:
            self.at = None
            log.warning("%s: %s are kept again", self._path, self._contents)


def is_full(error: Exception, folder: Path) -> bool:
    """Return whether the system or SQLite found no room in `folder`.

    SQLite has its own error for a full disk, but none for a quota or a lack of inodes.
    """
    if isinstance(error, OSError):
        return error.errno in FULL
    if not isinstance(error, sqlite3.OperationalError):
        return False
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return True
    if not error.sqlite_errorname.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")):
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(LEAST_ROOM))
    except OSError as found:
        return found.errno in FULL
    return False


def open_file(
    path: Path, prepare: Callable[[sqlite3.Connection], None], retry: Retry
) -> sqlite3.Connection | None:
    """Open a SQLite file for reading and writing, after `prepare`; None where the disk is too full.
    Raises sqlite3.Error, OSError, and the errors of `prepare`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(contextlib.closing(connect(path)))
            prepare(file)
            opened.pop_all()
            return file
    except (sqlite3.OperationalError, OSError) as error:
        if not is_full(error, path.parent):
            raise
        retry.failed(error)
        return None


@contextlib.contextmanager
def file_to_read(
    path: Path, opened: sqlite3.Connection | None
) -> Iterator[sqlite3.Connection | None]:
    """Give the file at `path`, even if `open_file` had no room to open it; None for a new file.
    Raises sqlite3.Error."""
    if opened is not None or not path.exists():
        yield opened
        return
    with contextlib.closing(connect(path)) as file:
        # The log's index then lies in memory, otherwise in a file.
        file.execute("pragma locking_mode = exclusive")
        yield file if file.execute("select name from sqlite_master").fetchall() else None


def connect(path: Path) -> sqlite3.Connection:
    """Connect so that threads may share the connection by turns."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
