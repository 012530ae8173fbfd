"""Which folder a model's blocks are in, and how much of the disk they may take."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "kv-"
LOCK = "lock"
_ENGINES = 4096

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


def open_folder(root: Path, identity: bytes, most_bytes: int) -> TierFolder:
    """The folder below `root` for blocks of this identity: one that an earlier process left, if
    there is one that no process has now.

    Folders of others that no process has are deleted, those that were used longest ago first,
    until they take half of `most_bytes`; what they take is not this one's. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(_ENGINES):
        path = root / f"{PREFIX}{identity.hex()[:32]}-{number}"
        path.mkdir(exist_ok=True, mode=0o700)
        about = path.lstat()
        if about.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
            raise PermissionError(f"{path} is another user's, or no folder")
        lock = _locked(path)
        if lock is not None:
            break
    else:
        raise OSError(f"{root}: {_ENGINES} engines have folders there")
    os.utime(path)
    taken = 0
    for other in sorted(_others(root, path), key=lambda one: one.stat().st_mtime, reverse=True):
        size = sum(file.stat().st_blocks * 512 for file in other.iterdir())
        if taken + size > most_bytes // 2:
            _delete(other)
        else:
            taken += size
    return TierFolder(path, most_bytes - taken, lock)


def _others(root: Path, mine: Path) -> Iterator[Path]:
    """Folders of blocks that no process has."""
    for path in root.glob(f"{PREFIX}*"):
        if path != mine and path.is_dir() and not path.is_symlink():
            lock = _locked(path)
            if lock is not None:
                os.close(lock)
                yield path


def _delete(path: Path) -> None:
    lock = _locked(path)
    if lock is None:
        return
    log.info("%s: blocks of another model are deleted", path)
    with suppress(OSError):
        shutil.rmtree(path)
    os.close(lock)


def _locked(path: Path) -> int | None:
    """The lock of a folder; None if another process has it."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
