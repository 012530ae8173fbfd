"""Blocks in the slots of a file, and an index of what they are, with checksums of both.

The index begins with a header that says what the blocks are of; then comes a record for each slot.
A record is written after its block and erased before the next one, so what a process that was
killed leaves is either whole or not in the index. After a loss of power a record may be there
without its block: then the checksum of the block, which covers its key, is wrong.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Folder -------------------------------------------------------------------------------------------
#
# Which folder a model's blocks are in, and how much of the disk they may take.


PREFIX = "kv-"
LOCK = "lock"
_ENGINES = 4096
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}-[0-9]+")
"""Other folders may be anybody's."""


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


# Slot file ----------------------------------------------------------------------------------------


INDEX, BLOCKS = "index", "blocks"
HEADER_BYTES = 64
MOST_SLOTS = 1 << 19
"""What is known of a block takes about 400 bytes of memory."""
MAGIC = b"rootlace blocks2"
RECORD = np.dtype(
    [
        ("key", "V16"),
        ("owner", "V16"),
        ("used", "<f8"),
        ("crc", "<u4"),
        ("wanted", "<u4"),
        ("filled", "<u4"),
        ("check", "<u4"),
    ]
)
"""`used`: seconds since 1970. `crc`: of key and block. `check`: CRC-32 of the fields before it."""
_CHECKED = RECORD.itemsize - 4

log = logging.getLogger(__name__)


class DamagedBlock(Exception):
    """A slot does not hold what was written there."""


@dataclass(frozen=True)
class Kept:
    """A block that an earlier process wrote."""

    slot: int
    key: bytes
    owner: bytes
    wanted: bool


class SlotFile:
    """`num_slots` blocks of `block_bytes`. `read` and `write` may be called from different
    threads, though not for the same slot at a time."""

    def __init__(self, folder: Path, identity: bytes, block_bytes: int, num_slots: int) -> None:
        """Open or make the files in `folder`, which is this process's alone. What is there of
        another identity (32 bytes) or size is dropped. Raises OSError."""
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.path = folder / BLOCKS
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._index = os.open(folder / INDEX, flags, 0o600)
        self._blocks = os.open(self.path, flags, 0o600)
        self._records = np.zeros(num_slots, RECORD)
        header = (MAGIC + identity + block_bytes.to_bytes(8, "little")).ljust(HEADER_BYTES, b"\0")
        found = os.pread(self._index, HEADER_BYTES, 0)
        if found != header:
            if found:
                log.warning("%s: blocks of something else are dropped", folder)
            os.ftruncate(self._blocks, 0)
            os.ftruncate(self._index, 0)
            _write(self._index, header, 0)
        self._read_index(folder)

    @staticmethod
    def slots_in(most_bytes: int, block_bytes: int) -> int:
        """How many slots both files may have together in so many bytes. At most `MOST_SLOTS`."""
        return min(max(most_bytes - HEADER_BYTES, 0) // (block_bytes + RECORD.itemsize), MOST_SLOTS)

    def _read_index(self, folder: Path) -> None:
        size = os.fstat(self._blocks).st_size
        data = os.pread(self._index, self.num_slots * RECORD.itemsize, HEADER_BYTES)
        given = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
        damaged = 0
        for slot in np.flatnonzero(given["filled"]).tolist():
            record = given[slot : slot + 1]
            if record["check"][0] != _check(record) or (slot + 1) * self.block_bytes > size:
                damaged += 1
                continue
            self._records[slot] = record[0]
        if damaged:
            log.warning("%s: %d records are damaged, and ignored", folder, damaged)
        # Another start may have had more room.
        os.ftruncate(self._index, HEADER_BYTES + len(given) * RECORD.itemsize)
        os.ftruncate(self._blocks, min(size, self.num_slots * self.block_bytes))

    def kept(self) -> list[Kept]:
        """What is there, that which was used longest ago first."""
        slots = np.flatnonzero(self._records["filled"])
        slots = slots[np.argsort(self._records["used"][slots], kind="stable")]
        return [
            Kept(
                slot,
                self._records["key"][slot].tobytes(),
                self._records["owner"][slot].tobytes(),
                bool(self._records["wanted"][slot]),
            )
            for slot in slots.tolist()
        ]

    def write(self, slot: int, block: np.ndarray) -> None:
        """Write a block (uint8), which is in no index before `publish`. Raises OSError."""
        if self._records["filled"][slot]:
            self.erase([slot])
        _write(self._blocks, block.data, slot * self.block_bytes)

    def publish(self, slot: int, crc: int, key: bytes, owner: bytes) -> None:
        """Put a slot that was written into the index. `crc`: `checksum` of key and block. Raises
        OSError."""
        record = np.zeros(1, RECORD)
        record["key"], record["owner"] = np.void(key), np.void(owner)
        record["used"], record["filled"] = time.time(), 1
        record["crc"] = crc
        record["check"] = _check(record)
        self._records[slot] = record[0]
        self._put(slot)

    def erase(self, slots: Iterable[int]) -> None:
        """Take slots out of the index. Raises OSError."""
        for slot in slots:
            self._records[slot] = np.zeros(1, RECORD)[0]
            self._put(slot)

    def expect(self, slots: Sequence[int]) -> None:
        """Nothing is read before it is asked for."""

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None:
        """Read a block (uint8). `crc`: its `checksum`; None: the one in the index. Raises
        `DamagedBlock`, or OSError."""
        view, at = into.data, slot * self.block_bytes
        done = 0
        while done < self.block_bytes:
            count = os.preadv(self._blocks, [view[done:]], at + done)
            if not count:
                break
            done += count
        if crc is None:
            crc = int(self._records["crc"][slot])
        if done < self.block_bytes or checksum(key, into) != crc:
            raise DamagedBlock(f"{self.path}: slot {slot} does not hold what was written")

    def holds(self, slot: int) -> bool:
        """Whether the index has the slot."""
        return bool(self._records["filled"][slot])

    def forget_pages(self) -> None:
        """Have the next reads come from the disk."""
        os.fdatasync(self._blocks)
        os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, wanted: dict[int, bool] | None = None) -> None:
        """Close the files. `wanted`: all slots that hold something, that which is to be dropped
        next first, and whether it was wanted: so the next start goes on in this order. Raises
        OSError where that cannot be written; they are closed then, too."""
        try:
            if wanted is not None:
                self._reorder(wanted)
        finally:
            os.close(self._index)
            os.close(self._blocks)

    def _reorder(self, wanted: dict[int, bool]) -> None:
        now = time.time()
        for place, (slot, was_wanted) in enumerate(wanted.items()):
            record = self._records[slot : slot + 1]
            if record["filled"][0]:
                record["used"] = now + 1e-6 * place
                record["wanted"] = was_wanted
                record["check"] = _check(record)
        last = max(np.flatnonzero(self._records["filled"]), default=-1)
        _write(self._index, self._records[: last + 1].tobytes(), HEADER_BYTES)

    def _put(self, slot: int) -> None:
        data = self._records[slot : slot + 1].tobytes()
        _write(self._index, data, HEADER_BYTES + slot * RECORD.itemsize)


def checksum(key: bytes, block: np.ndarray) -> int:
    """CRC-32 of both."""
    return zlib.crc32(block.data, zlib.crc32(key))


def _check(record: np.ndarray) -> int:
    return zlib.crc32(record.tobytes()[:_CHECKED])


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count
