"""Which folder a model's blocks are in, and how much of the disk they may take."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "kv-"
LOCK = "lock"
_ENGINES = 4096
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}-[0-9]+")
"""Other folders may be anybody's."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierFolder:
    """A folder that is this process's alone while `lock` (a file descriptor) is open, and how many
    bytes may be kept there."""

    path: Path
    most_bytes: int
    lock: int

    def close(self) -> None:
        os.close(self.lock)


def open_folder(root: Path, identity: bytes, most_bytes: int, engines: int = 1) -> TierFolder:
    """The folder below `root` for blocks of this identity: one that an earlier process left, if
    there is one that no process has now. So many `engines` of the identity are to have one each.

    Folders of others that no process has are deleted, those that were used longest ago first,
    until they take half of `most_bytes`; what they take is not this one's. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    turn = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # where folders cannot be locked
            # One process at a time: to see whether a folder is in use is to lock it for a moment.
            fcntl.flock(turn, fcntl.LOCK_EX)
        names = [f"{PREFIX}{identity.hex()[:32]}-{number}" for number in range(_ENGINES)]
        path, lock = _first_free(root, names)
        try:
            os.utime(path)
            return TierFolder(path, most_bytes - _tidy(root, names[:engines], most_bytes), lock)
        except BaseException:
            os.close(lock)
            raise
    finally:
        os.close(turn)


def _first_free(root: Path, names: list[str]) -> tuple[Path, int]:
    """The first folder of these names that no other process has, and its lock."""
    for name in names:
        path = root / name
        path.mkdir(exist_ok=True, mode=0o700)
        about = path.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
            raise PermissionError(f"{path} is another user's, or no folder")
        lock = _locked(path)
        if lock is not None:
            path.chmod(0o700)
            return path, lock
    raise OSError(f"{root}: {len(names)} engines have folders there")


def _tidy(root: Path, own: list[str], most_bytes: int) -> int:
    """Delete folders that no process has, but none of these names. The bytes of those that stay."""
    found = []
    for path in root.glob(f"{PREFIX}*"):
        if path.name not in own and _NAME.fullmatch(path.name):
            with suppress(OSError):  # somebody deletes it
                about = path.lstat()
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                    found.append((about.st_mtime, path))
    taken = 0
    for _, path in sorted(found, reverse=True):
        with suppress(OSError):
            lock = _locked(path)
            if lock is None:
                continue
            try:
                size = sum(file.stat().st_blocks * 512 for file in path.iterdir())
                if taken + size <= most_bytes // 2:
                    taken += size
                    continue
                log.info("%s: blocks of another model are deleted", path)
                shutil.rmtree(path)
            finally:
                os.close(lock)
    return taken


def _locked(path: Path) -> int | None:
    """The lock of a folder; None if another process has it."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
