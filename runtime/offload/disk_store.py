"""Blocks in the slots of a file, and an index of their keys, with checksums of both.

 blocks  | slot 0 | slot 1 | slot 2 | ...
 index   | header | record 0 | record 1 | ...     record: key, owner, time, checksum

The index header identifies model and layout; a record for each slot follows. A record is written
after its block and erased before the next block. So after a kill a block is either complete or not
indexed. After a power loss a record may lack its block: then the checksum of key and block is
wrong.
"""

from __future__ import annotations

import errno
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
from pathlib import Path

import msgspec
import numpy as np

# Folder -------------------------------------------------------------------------------------------


PREFIX = "kv-"
LOCK = "lock"
_ENGINES = 4096
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}-[0-9]+")
"""Other folders may belong to other programs."""


class TierFolder(msgspec.Struct, frozen=True):
    """A folder owned by this process while `lock` (a descriptor) is open, and its byte limit."""

    path: Path
    most_bytes: int
    lock: int

    def close(self) -> None:
        os.close(self.lock)


def open_folder(root: Path, identity: bytes, most_bytes: int, engines: int = 1) -> TierFolder:
    """Return the folder below `root` for blocks of this identity, preferably of an earlier process.

    A folder in use by another process is skipped. `engines` engines of the identity get one each.
    Unused folders of other identities are deleted, the least recently used first, until these take
    half of `most_bytes`; the rest of their bytes is unavailable. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    turn = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # where folders cannot be locked
            # One process at a time: checking whether a folder is in use locks the folder for a
            # moment.
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
    """Return the first folder that no other process uses, and its lock."""
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


def _tidy(root: Path, used: list[str], most_bytes: int) -> int:
    """Delete unused folders except `used`; return the bytes of the folders that stay."""
    files = []
    for path in root.glob(f"{PREFIX}*"):
        if path.name not in used and _NAME.fullmatch(path.name):
            with suppress(OSError):  # another process may delete the folder
                about = path.lstat()
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                    files.append((about.st_mtime, path))
    taken = 0
    for _, path in sorted(files, reverse=True):
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
    """Return the lock of a folder; None if another process has the lock."""
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
"""Most slots of a store: the index takes about 400 bytes of memory per block."""
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

FULL = (errno.ENOSPC, errno.EDQUOT)
RESERVE = 0.05, 1 << 30
"""Space kept free on a file system: a share of it, and a maximum in bytes."""

log = logging.getLogger(__name__)


class DamagedBlock(Exception):
    """Raised when a slot does not hold the block that was written."""


class StoredBlock(msgspec.Struct, frozen=True):
    """A block that an earlier process wrote."""

    slot: int
    key: bytes
    owner: bytes
    wanted: bool


class SlotFile:
    """`num_slots` blocks of `block_bytes`.

    `read` and `write` may be called from different threads, for different slots.
    """

    def __init__(self, folder: Path, identity: bytes, block_bytes: int, num_slots: int) -> None:
        """Open or make the files in `folder`, which this process owns.

        Blocks of another identity (32 bytes) or size are dropped. Raises OSError.
        """
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.path = folder / BLOCKS
        self._folder = folder
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._index = os.open(folder / INDEX, flags, 0o600)
        self._blocks = os.open(self.path, flags, 0o600)
        self._records = np.zeros(num_slots, RECORD)
        header = (MAGIC + identity + block_bytes.to_bytes(8, "little")).ljust(HEADER_BYTES, b"\0")
        stored = os.pread(self._index, HEADER_BYTES, 0)
        self._unwritten = b""
        """The header until the disk has room for it."""
        if stored != header:
            if stored:
                log.warning("%s: blocks of something else are dropped", folder)
            os.ftruncate(self._blocks, 0)
            os.ftruncate(self._index, 0)
            self._unwritten = header
        self._read_index(folder)
        self._stored = self._records["filled"].astype(bool)
        """Slots whose bytes have space on the disk."""
        wanted, free = block_bytes * int(np.count_nonzero(~self._stored)), self.free_bytes()
        if free < wanted:
            available = max(free, 0) / 1e9
            log.warning(
                "%s: the disk has room for %.1f of %.1f GB", folder, available, wanted / 1e9
            )

    @staticmethod
    def slots_in(most_bytes: int, block_bytes: int) -> int:
        """Return the slots whose two files fit in `most_bytes`, at most `MOST_SLOTS`."""
        return min(max(most_bytes - HEADER_BYTES, 0) // (block_bytes + RECORD.itemsize), MOST_SLOTS)

    def _read_index(self, folder: Path) -> None:
        size = os.fstat(self._blocks).st_size
        data = os.pread(self._index, self.num_slots * RECORD.itemsize, HEADER_BYTES)
        records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
        damaged = 0
        for slot in np.flatnonzero(records["filled"]).tolist():
            record = records[slot : slot + 1]
            if record["check"][0] != record_check(record) or (slot + 1) * self.block_bytes > size:
                damaged += 1
                continue
            self._records[slot] = record[0]
        if damaged:
            log.warning("%s: %d records are damaged, and ignored", folder, damaged)
        # Another start may have had more room.
        os.ftruncate(self._index, HEADER_BYTES + len(records) * RECORD.itemsize)
        os.ftruncate(self._blocks, min(size, self.num_slots * self.block_bytes))

    def stored_blocks(self) -> list[StoredBlock]:
        """Blocks in the file, the least recently used first."""
        return blocks_of(self._records)

    def free_bytes(self) -> int:
        """Return the bytes that may still be written; the disk keeps its `RESERVE`."""
        disk = shutil.disk_usage(self._folder)
        return disk.free - min(int(RESERVE[0] * disk.total), RESERVE[1])

    def write(self, slot: int, block: np.ndarray) -> None:
        """Write a block (uint8), which is not indexed before `publish`. Raises OSError, with an
        `errno` of `FULL` where it would leave less than the reserve."""
        if not self._stored[slot] and self.free_bytes() < self.block_bytes:
            raise OSError(errno.ENOSPC, "the disk is full but for what is kept free", self.path)
        if self._records["filled"][slot]:
            self.erase([slot])
        _write(self._blocks, block.data, slot * self.block_bytes)
        self._stored[slot] = True

    def publish(self, slot: int, crc: int, key: bytes, owner: bytes) -> None:
        """Index a written slot; `crc` is the `checksum` of key and block. Raises OSError."""
        if self._unwritten:
            _write(self._index, self._unwritten, 0)
            self._unwritten = b""
        record = new_record(key, owner, crc)
        _write(self._index, record.tobytes(), HEADER_BYTES + slot * RECORD.itemsize)
        self._records[slot] = record[0]

    def erase(self, slots: Iterable[int]) -> None:
        """Remove slots from the index. Raises OSError; then the rest of them stays."""
        for slot in slots:
            if self._records["filled"][slot]:
                _write(self._index, bytes(RECORD.itemsize), HEADER_BYTES + slot * RECORD.itemsize)
                self._records[slot] = np.zeros(1, RECORD)[0]

    def expect(self, slots: Sequence[int]) -> None:
        """Do nothing: a disk reads no block ahead."""

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None:
        """Read a block (uint8); `crc` is its `checksum`, None: the indexed one.

        Raises `DamagedBlock`, or OSError.
        """
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
        """Return whether the slot is indexed."""
        return bool(self._records["filled"][slot])

    def forget_pages(self) -> None:
        """Drop the page cache, so that the next reads come from the disk."""
        os.fdatasync(self._blocks)
        os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, wanted: dict[int, bool] | None = None) -> None:
        """Close the files, after recording the order of eviction.

        `wanted`: slots in use in order of eviction -> whether a request asked for the block. The
        next start goes on in this order. Raises OSError if writing fails, with the files closed.
        """
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
                record["check"] = record_check(record)
        last = max(np.flatnonzero(self._records["filled"]), default=-1)
        _write(self._index, self._records[: last + 1].tobytes(), HEADER_BYTES)


def new_record(key: bytes, owner: bytes, crc: int = 0) -> np.ndarray:
    """Return the record of a block used now, [1]."""
    record = np.zeros(1, RECORD)
    record["key"], record["owner"] = np.void(key), np.void(owner)
    record["used"], record["crc"], record["filled"] = time.time(), crc, 1
    record["check"] = record_check(record)
    return record


def blocks_of(records: np.ndarray) -> list[StoredBlock]:
    """Blocks of the filled ones of `records`, the least recently used first."""
    slots = np.flatnonzero(records["filled"])
    slots = slots[np.argsort(records["used"][slots], kind="stable")]
    return [
        StoredBlock(
            slot,
            records["key"][slot].tobytes(),
            records["owner"][slot].tobytes(),
            bool(records["wanted"][slot]),
        )
        for slot in slots.tolist()
    ]


def checksum(key: bytes, block: np.ndarray) -> int:
    """CRC-32 of key and block."""
    return zlib.crc32(block.data, zlib.crc32(key))


def record_check(record: np.ndarray) -> int:
    """CRC-32 of a record [1] but for its `check`."""
    return zlib.crc32(record.tobytes()[:_CHECKED])


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count


# Read speed ---------------------------------------------------------------------------------------


PROBE_BYTES = 32 << 20
_MOST = 32
ASSUMED_RATE = 500e6
"""Bytes per second that a disk without room for a probe is taken to read."""
PROBE = "probe"


def block_seconds(file: SlotFile, folder: Path, stored: Sequence[StoredBlock]) -> float:
    """Measured seconds to read a block and its checksum in random order.

    Reads existing blocks or, if few, a temporary file: at most 32 blocks and 32 MiB, at least one
    block. A full disk, or a used-up quota, has no room for the file: without blocks its rate is
    assumed. Raises OSError.
    """
    count = min(max(PROBE_BYTES // file.block_bytes, 1), _MOST)
    if len(stored) < count and file.free_bytes() >= count * file.block_bytes:
        try:
            return _probe_seconds(folder / PROBE, file.block_bytes, count)
        except OSError as error:
            if error.errno not in FULL:
                raise
    if not stored:
        return file.block_bytes / ASSUMED_RATE
    return _read_seconds(file, stored, min(count, len(stored)))


def _read_seconds(file: SlotFile, stored: Sequence[StoredBlock], count: int) -> float:
    """Seconds to read each of `count` kept blocks."""
    buffer = np.empty(file.block_bytes, np.uint8)
    file.forget_pages()
    order = np.random.default_rng(0).choice(len(stored), count, replace=False)
    chosen = [stored[at] for at in order.tolist()]
    begun = time.perf_counter()
    for one in chosen:
        try:
            file.read(one.slot, one.key, buffer)
        except DamagedBlock:
            continue  # the request that reads the block reports the damage
    return (time.perf_counter() - begun) / count


def _probe_seconds(path: Path, size: int, count: int) -> float:
    """Return seconds to read each of `count` blocks of a file written for the measurement."""
    order = np.random.default_rng(0)
    probe = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        buffer = np.resize(order.integers(0, 256, 65536, np.uint8), size)
        for _ in range(count):
            os.write(probe, buffer.data)
        os.fdatasync(probe)
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        for at in order.permutation(count).tolist():
            os.preadv(probe, [buffer.data], at * size)
            zlib.crc32(buffer.data)
        return (time.perf_counter() - begun) / count
    finally:
        os.close(probe)
        path.unlink(missing_ok=True)
