"""A folder of packed weights: found, kept, and deleted where there are too many."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rootlace.kernels.native.build import user_cache
from rootlace.runtime.model.decoder.packed_weights import PackedWeights
from rootlace.runtime.model.weight_cache.entry import (
    DamagedEntry,
    Entry,
    entry_bytes,
    write_entry,
)

SUFFIX, PART = ".packed", ".packed.part"
"""Of what is whole, and of what somebody writes, who holds a lock on it. Both are names that nobody
else uses: the folder may hold other files, too."""
SHARE = 4
"""Unless told, the folder takes this part of the disk space that would be free without it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A file of the folder. `used`: when a start last mapped it, in seconds since 1970."""

    path: Path
    size: int
    used: float


@dataclass(frozen=True)
class WeightCache:
    """Files of packed weights, by their keys. `most_bytes`: what all of them may take; None: a
    share of the disk. `least_bytes`: smaller checkpoints are packed in no time."""

    folder: Path
    most_bytes: int | None = None
    least_bytes: int = 64 << 20

    @classmethod
    def chosen(cls, folder: str, most_bytes: int | None = None) -> WeightCache | None:
        """What the options of that name say; None where nothing is to be kept."""
        if folder == "off":
            return None
        path = Path(folder).expanduser() if folder else user_cache() / "weights"
        return cls(path, most_bytes)

    def find(self, key: str) -> Entry | None:
        """The weights of this key. They are used now: others are deleted before them. A file that
        is damaged is deleted, also if that is only found later, by the thread that reads all of it.
        So is what a process left half written that is gone."""
        path = self._path(key)
        try:
            self._delete_parts()
            if path.stat().st_uid not in (os.getuid(), 0):  # who may write to it
                log.warning(
                    "packed weights are neither used nor kept: %s is another user's; "
                    "--weight-cache names a folder of your own",
                    path,
                )
                return None
            found = Entry.read(path)
            with suppress(OSError):
                os.utime(path)  # many systems do not note reading
        except DamagedEntry as error:
            log.warning("packed weights are made again: %s", error)
            with suppress(OSError):
                path.unlink()
            return None
        except OSError:
            return None
        # No daemon: it ends by itself, with the main thread, and not in the middle of C code.
        threading.Thread(target=_verify, args=(found,), name="weights").start()
        return found

    def keep(
        self, key: str, packed: PackedWeights, model: str, embedding: str | None
    ) -> threading.Thread:
        """Write weights for later starts, on a thread that ends with the process. A file that was
        not written to its end is never seen. What goes wrong is logged."""

        def write() -> None:
            try:
                self._write(key, packed, model, embedding)
            except OSError as error:
                log.warning("packed weights are not kept for the next start: %s", error)

        thread = threading.Thread(target=write, name="weights", daemon=True)
        thread.start()
        return thread

    def kept(self) -> list[Kept]:
        """What is there, the one used last at the end."""
        found = []
        for path in self._listed(SUFFIX):
            with suppress(OSError):  # deleted by another process
                about = path.stat()
                found.append(Kept(path, about.st_size, about.st_mtime))
        return sorted(found, key=lambda one: (one.used, one.path))

    def clear(self) -> int:
        """Delete all of it, and say how many bytes that were. Engines that run keep what they
        have."""
        return sum(self._delete(one) for one in self.kept())

    def _write(self, key: str, packed: PackedWeights, model: str, embedding: str | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part, path = self.folder / f"{key}{PART}", self._path(key)
        with _locked(part) as file:
            if file is None or path.exists():  # another process writes it, or has done so
                return
            try:
                if not self._make_room(entry_bytes(packed)):
                    return
                write_entry(file, packed, model, embedding)
                part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        log.info("packed weights are kept for the next start: %s", path)

    def _delete_parts(self) -> None:
        for path in self._listed(PART):
            with suppress(OSError), _locked(path) as left:  # by a process that is gone
                if left is not None:
                    path.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Delete what was not used for longest until there is room; False where there is none."""
        kept = self.kept()
        taken, most = sum(one.size for one in kept), self.most_bytes
        if most is None:
            most = (shutil.disk_usage(self.folder).free + taken) // SHARE
        if size > most:
            log.info(
                "packed weights are not kept for the next start: they take %.1f GiB, and %s may "
                "take %.1f",
                *(size / 2**30, self.folder, most / 2**30),
            )
            return False
        for one in kept:
            if taken + size > most:
                taken -= self._delete(one)
        return True

    def _delete(self, one: Kept) -> int:
        """How many bytes that made free."""
        try:
            one.path.unlink(missing_ok=True)
        except PermissionError:  # another user's
            return 0
        return one.size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _listed(self, suffix: str) -> list[Path]:
        return list(self.folder.glob(f"*{suffix}"))


def _verify(entry: Entry) -> None:
    try:
        entry.verify()
    except DamagedEntry as error:
        log.error(
            "packed weights are damaged, and tokens since this start may be wrong; the next step "
            "ends this process, and the next start packs them: %s",
            error,
        )
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as failure:  # the next start would map it again
            log.error("that file is to be deleted by hand: %s", failure)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """The file, empty, for this process alone; None where another one has it. Raises OSError for a
    link: what it leads to is not emptied."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been renamed or deleted between the two.
            mine = os.fstat(file.fileno()).st_ino == path.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if mine:
            file.truncate(0)
        yield file if mine else None
