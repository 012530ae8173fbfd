"""What the files of `--state` do on a full disk: start, log so once, and try again later."""

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
"""Numbers of the errors that a disk without room gives."""
RETRY_SECONDS = 2.0
"""How often writing is tried again where the disk is full."""
LEAST_ROOM = 1 << 20
"""Bytes that can be written to a new file where there is room."""


class Retry:
    """When writing to a file is tried again after a failure; the log has the first failure only."""

    def __init__(self, path: Path, kept: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`kept` names, in the log, what the file keeps."""
        self._path = path
        self._kept = kept
        self._clock = clock
        self.at: float | None = None
        """Not before that is writing tried again; None where the last attempt succeeded."""

    @property
    def due(self) -> bool:
        """Whether writing may be tried now."""
        return self.at is None or self._clock() >= self.at

    @property
    def seconds(self) -> float:
        """Until writing may be tried."""
        return 0.0 if self.at is None else max(self.at - self._clock(), 0.0)

    def hurry(self) -> None:
        """Let the next attempt be now."""
        if self.at is not None:
            self.at = self._clock()

    def failed(self, error: Exception) -> None:
        """Note that an attempt failed."""
        if self.at is None:
            log.error(
                "%s: %s are not kept any more, and would not survive a restart: %s",
                self._path,
                self._kept,
                error,
            )
        self.at = self._clock() + RETRY_SECONDS

    def succeeded(self) -> None:
        """Note that an attempt succeeded."""
        if self.at is not None:
            self.at = None
            log.warning("%s: %s are kept again", self._path, self._kept)


def is_full(error: Exception, folder: Path) -> bool:
    """Whether the system or SQLite found no room in `folder`.

    SQLite has an error of its own where the disk is full, but neither for a quota nor for want of
    inodes.
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
    """A file of SQLite which `prepare` made ready for reading and writing; None where the disk is
    too full for that. Raises sqlite3.Error, OSError, and what `prepare` raises."""
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
    """The file at `path`, also where `open_file` had no room to open it; None for a new one.
    Raises sqlite3.Error."""
    if opened is not None or not path.exists():
        yield opened
        return
    with contextlib.closing(connect(path)) as file:
        # The index of the log is in memory then, where else it has a file.
        file.execute("pragma locking_mode = exclusive")
        yield file if file.execute("select name from sqlite_master").fetchall() else None


def connect(path: Path) -> sqlite3.Connection:
    """Threads may share it where they take turns."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
