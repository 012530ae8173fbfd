"""A disk without room for the files of `--state`."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rootlace.runtime.server import full_disk

FAILURES = [
    ("", 0),
    ("SQLITE_IOERR_SHMSIZE", errno.ENOSPC),
    ("SQLITE_IOERR_WRITE", errno.EDQUOT),
    ("SQLITE_CANTOPEN", errno.ENOSPC),
]
FAILURE_NAMES = ["new", "no room for an index", "quota", "no inode"]


class FullDisk:
    """Fails to open files: a new file needs room for tables, an old one for its log's index."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, fails: str, number: int
    ) -> None:
        """`fails`: what SQLite says of an old file; empty for a new one, of which it says so
        itself. `number`: the system's error for a new file in `folder`."""
        self.full = False
        self._folder = folder
        self._fails = fails
        self._number = number
        self._connect = full_disk.connect
        monkeypatch.setattr(full_disk, "connect", self.connect)
        monkeypatch.setattr("tempfile.TemporaryFile", self.probe)

    def connect(self, path: Path) -> sqlite3.Connection:
        if not self.full:
            return self._connect(path)
        if self._fails:
            file = sqlite3.connect(path, isolation_level=None, factory=_NoRoom)
            file.fails = self._fails
            return file
        file = self._connect(path)
        file.execute("pragma max_page_count = 1").fetchone()
        return file

    def probe(self, dir: Path) -> None:
        assert dir == self._folder
        raise OSError(self._number, "no room")


class _NoRoom(sqlite3.Connection):
    """A file that can be read only while nobody else may use it."""

    fails = ""
    exclusive = False

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        self.exclusive |= sql == "pragma locking_mode = exclusive"
        self._find_room()
        return super().execute(sql, *args)

    def executescript(self, sql: str) -> sqlite3.Cursor:
        self._find_room()
        return super().executescript(sql)

    def _find_room(self) -> None:
        if not self.exclusive:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = getattr(sqlite3, self.fails)
            error.sqlite_errorname = self.fails
            raise error
