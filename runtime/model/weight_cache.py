"""Keep one model's packed weights in a file that can be mapped. The file has arrays, each at a
multiple of `LINE` bytes; then a table of them; then `TRAILER`, which checks both."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

import rootlace.kernels
import rootlace.runtime.model
from rootlace.kernels.native import library as native
from rootlace.kernels.native.build import user_cache
from rootlace.kernels.native.machine import HUGE_PAGE
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32, LINE, Packed
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.weights import Blocks
from rootlace.runtime.model.decoder.native_weights import PackedWeights

# Key ----------------------------------------------------------------------------------------------
#
# Derive the key of packed weights from everything that decides their bytes.


SAMPLE = 4096
SAMPLES = 64
"""Number of sampled places of a file, `SAMPLE` bytes each. The first `BEGINNING` bytes, with the
names and shapes of tensors, are read as well."""
BEGINNING = 1 << 20


def cache_key(
    config: ModelConfig,
    files: Iterable[Path],
    library: ctypes.CDLL | None,
    dtype: np.dtype[Any],
    *options: str,
) -> str:
    """Return a digest of everything that decides the bytes of packed weights. It covers the
    configuration; name, size, times of change, beginning and samples of each of the weights'
    `files`; the native library and its instruction set, if used; this package's code, and the
    versions of torch and NumPy; `dtype` and the `options` options. Raises OSError for a file that
    cannot be read.

    The times are those of the bytes, which programs can set, and of the file (`st_ctime`), which
    programs cannot set. So weights that are changed in place have another key; so have weights that
    are only copied, or given other rights.
    """
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(data).to_bytes(8, "little") + data)

    add(json.dumps(config.source.config(), sort_keys=True), dtype, *options)
    add(_torch_version(), np.__version__)
    if library is not None:
        add(library.rl_instructions(), Path(library._name).read_bytes())
    for package in (rootlace.kernels, rootlace.runtime.model):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            add(source.name, source.read_bytes())
    for file in sorted(files):
        with file.open("rb") as opened:
            about = os.fstat(opened.fileno())
            add(file.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            add(opened.read(BEGINNING))
            add(*samples(about.st_size, lambda at: os.pread(opened.fileno(), SAMPLE, at)))
    return digest.hexdigest()[:32]


def _torch_version() -> bytes:
    """Return torch's version file, unimported. (`importlib.metadata` takes 20 ms and a MB.)"""
    torch = find_spec("torch")
    places = torch and torch.submodule_search_locations
    return (Path(places[0]) / "version.py").read_bytes() if places else b""


def samples(size: int, read: Callable[[int], bytes]) -> Iterable[bytes]:
    """Read at `SAMPLES` places of `size` bytes, the last of them at the end."""
    for place in range(SAMPLES):
        yield read(max(size - SAMPLE, 0) * place // (SAMPLES - 1))


# Entry --------------------------------------------------------------------------------------------


TRAILER = struct.Struct("<32sQ16s")
"""SHA-256 of the table and of samples of the arrays, the table's bytes, `MAGIC`."""
MAGIC = b"rootlace packed8"
BLOCKS = "embedding.blocks"
LOOKED_UP = (BLOCKS, "embedding", "positions")
"""Tables of which a step reads a row for each token."""
AT_ONCE = 64 << 20
"""Bytes written before a flush to the disk, since unflushed data takes memory. Also the bytes
checked before the next look at the main thread's end."""
DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "f32": FLOAT32,
    "bf16": BFLOAT16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DamagedEntry(Exception):
    """Error of a file that is not as written."""


class Array(msgspec.Struct, array_like=True):
    begin: int
    dtype: str
    shape: tuple[int, ...]
    crc: int
    """CRC-32 of the bytes: more than twice as fast as the cryptographic digests of `hashlib`."""

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Linear(msgspec.Struct, array_like=True):
    """Stored `Packed`."""

    memory: Array
    outputs: int
    inputs: int
    bias: Array | None
    order: Array | None
    schemes: bytes
    """`native.Scheme` structures of codes as bytes; empty: the weight is dense."""

    @property
    def arrays(self) -> Iterator[Array]:
        return (one for one in (self.memory, self.bias, self.order) if one is not None)


class Table(msgspec.Struct, array_like=True):
    model: str
    embedding: str | None
    """Checkpoint's tensor that is the embedding; None: the embedding is among `tensors`."""
    blocks: str | None
    """Type of the embedding's GGUF blocks among `tensors`; None: no blocks."""
    in_head: bool
    """Whether the embedding is looked up in the head."""
    arrays: int
    """Bytes of all arrays."""
    tensors: dict[str, Array]
    linears: dict[str, tuple[Linear, ...]]
    remarks: tuple[str, ...]


class Entry(msgspec.Struct, frozen=True):
    """File mapped read-only: it may be deleted, but not be written to."""

    path: Path
    table: Table
    memory: mmap.mmap
    damage: threading.Event = msgspec.field(default_factory=threading.Event)
    """Set when `verify` finds an array that is not as written."""

    @classmethod
    def read(cls, path: Path) -> Entry:
        """Map a file. Raises OSError if none exists, `DamagedEntry` if it is not whole."""
        with path.open("rb") as file:
            try:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise DamagedEntry(f"{path}: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)  # before the first read: small pages stay small
        try:
            digest, size, magic = TRAILER.unpack(memory[-TRAILER.size :])
            end = len(memory) - TRAILER.size
            table = memory[max(end - size, 0) : end]
            found = msgspec.msgpack.decode(table, type=Table) if magic == MAGIC else None
        except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedEntry(f"{path}: {error}") from error
        if found is None or found.arrays + size != end or _digest(memory, found, table) != digest:
            raise DamagedEntry(f"{path}: it is not whole")
        return cls(path, found, memory)

    def packed(self, checkpoint: Checkpoint) -> PackedWeights:
        """Return the weights, with the tensor that the table names in the `checkpoint`."""
        stored, kind, blocks = self.table.embedding, self.table.blocks, None
        tensors = {name: self._array(array) for name, array in self.table.tensors.items()}
        if kind is not None:
            blocks = Blocks(kind, tensors.pop(BLOCKS))
        elif stored is not None and not self.table.in_head:
            tensors["embedding"] = checkpoint.array(stored)
        linears = {
            name: tuple(map(self._linear, parts)) for name, parts in self.table.linears.items()
        }
        table = self.table
        return PackedWeights(
            linears,
            tensors,
            embedding_blocks=blocks,
            embedding_in_head=table.in_head,
            remarks=table.remarks,
            mapped=table.arrays,
            damage=self.damage,
        )

    def verify(self) -> None:
        """Compare all arrays with their checksums, which also brings the file into memory. Ends
        with the main thread. Other threads may use the interpreter meanwhile. Raises
        `DamagedEntry`, with `damage` set. Pages of lookup tables are released again: steps need
        few."""
        looked_up = [self.table.tensors[name] for name in LOOKED_UP if name in self.table.tensors]
        arrays = list(self.table.tensors.values())
        for parts in self.table.linears.values():
            arrays += (array for part in parts for array in part.arrays)
        with memoryview(self.memory) as memory:
            for array in arrays:
                crc = 0
                end = array.begin + array.size
                for begin in range(array.begin, end, AT_ONCE):
                    if not threading.main_thread().is_alive():
                        return
                    crc = zlib.crc32(memory[begin : min(begin + AT_ONCE, end)], crc)
                if crc != array.crc:
                    self.damage.set()
                    raise DamagedEntry(f"{self.path}: bytes {array.begin} to {end} have changed")
                if array in looked_up and hasattr(mmap, "MADV_DONTNEED"):
                    begin = -(-array.begin // mmap.PAGESIZE) * mmap.PAGESIZE
                    if length := max(end - begin, 0) // mmap.PAGESIZE * mmap.PAGESIZE:
                        with suppress(OSError):  # locked pages
                            self.memory.madvise(mmap.MADV_DONTNEED, begin, length)

    def _linear(self, linear: Linear) -> Packed:
        schemes = None
        if linear.schemes:
            count = len(linear.schemes) // ctypes.sizeof(native.Scheme)
            schemes = (native.Scheme * count).from_buffer_copy(linear.schemes)
        bias = None if linear.bias is None else self._array(linear.bias)
        order = None if linear.order is None else self._array(linear.order)
        memory = self._array(linear.memory)
        shape = (linear.outputs, linear.inputs)
        return Packed(memory, *shape, bias, order, schemes)

    def _array(self, array: Array) -> np.ndarray:
        count = math.prod(array.shape)
        found = np.frombuffer(self.memory, DTYPES[array.dtype], count, array.begin)
        return found.reshape(array.shape)


def write_entry(file: BinaryIO, packed: PackedWeights, model: str, embedding: str | None) -> None:
    """Write all of `packed`, except an embedding that is the checkpoint's tensor `embedding`, and
    flush to the disk. `file` is empty and not buffered."""
    writer = _Writer(file)
    tensors = {
        name: writer.array(tensor)
        for name, tensor in packed.tensors.items()
        if embedding is None or name != "embedding"
    }
    linears = {name: tuple(map(writer.linear, parts)) for name, parts in packed.linears.items()}
    kind = None
    if packed.embedding_blocks is not None:
        # A GGUF file may be overwritten while served: keep the blocks that steps read here.
        kind, tensors[BLOCKS] = (
            packed.embedding_blocks.type,
            writer.array(packed.embedding_blocks.data),
        )
    writer.align()
    writer.send()
    in_head = packed.embedding_in_head
    table = Table(model, embedding, kind, in_head, writer.at, tensors, linears, packed.remarks)
    data = msgspec.msgpack.encode(table)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        digest = _digest(memory, table, data)
    writer.add(memoryview(data + TRAILER.pack(digest, len(data), MAGIC)))
    writer.send()
    os.fsync(file.fileno())


def entry_bytes(packed: PackedWeights) -> int:
    """Return the approximate size of the file in bytes."""
    linears = [part for parts in packed.linears.values() for part in parts]
    biases = [part.bias for part in linears if part.bias is not None]
    arrays = [*packed.tensors.values(), *biases, *(part.memory for part in linears)]
    arrays += [] if packed.embedding_blocks is None else [packed.embedding_blocks.data]
    return sum(array.nbytes + LINE for array in arrays)


def _digest(memory: mmap.mmap, table: Table, data: bytes) -> bytes:
    digest = hashlib.sha256(data)
    for sample in samples(table.arrays, lambda at: memory[at : min(at + SAMPLE, table.arrays)]):
        digest.update(sample)
    return digest.digest()


class _Writer:
    """Writer of whole huge pages: Linux keeps data written at once in one huge page (ext4, since
    6.16), and maps it as one. With small pages a step of one row waits for addresses."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.at = 0
        self._page = bytearray()
        self._unsynced = 0

    def linear(self, packed: Packed) -> Linear:
        return Linear(
            self.array(packed.memory),
            packed.outputs,
            packed.inputs,
            None if packed.bias is None else self.array(packed.bias),
            None if packed.order is None else self.array(packed.order),
            b"" if packed.schemes is None else bytes(packed.schemes),
        )

    def array(self, array: np.ndarray) -> Array:
        self.align()
        start, crc = self.at, 0
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for begin in range(0, len(data), AT_ONCE):
            piece = data[begin : begin + AT_ONCE]
            crc = zlib.crc32(piece, crc)
            self.add(piece)
        return Array(start, _NAMES[array.dtype], array.shape, crc)

    def align(self) -> None:
        self.add(memoryview(bytes(-self.at % LINE)))

    def add(self, data: memoryview) -> None:
        self.at += len(data)
        while data:
            rest = HUGE_PAGE - len(self._page)
            self._page += data[:rest]
            data = data[rest:]
            if len(self._page) == HUGE_PAGE:
                self.send()

    def send(self) -> None:
        """Write the rest of a page."""
        with memoryview(self._page) as page:
            sent = 0
            while sent < len(page):
                sent += self._file.write(page[sent:])
        self._unsynced += sent
        self._page.clear()
        if self._unsynced >= AT_ONCE:
            os.fdatasync(self._file.fileno())
            self._unsynced = 0


# Folder -------------------------------------------------------------------------------------------
#
# Manage a folder of packed weights: find and keep entries, and delete the oldest.


SUFFIX, PART = ".packed", ".packed.part"
"""Endings of complete files, and of files that a process writes under a lock. Both are unique
names: the folder may hold other files, too."""
SHARE = 4
"""Part of the disk space (free without the folder) that the folder takes by default."""

log = logging.getLogger(__name__)


class CacheFile(msgspec.Struct, frozen=True):
    """File of the folder. `used`: last time a start mapped it, in seconds since 1970."""

    path: Path
    size: int
    used: float


class WeightCache(msgspec.Struct, frozen=True):
    """Folder of packed weights, by their keys. `most_bytes`: limit of all files; None: a share of
    the disk. `least_bytes`: smaller checkpoints are packed at each start."""

    folder: Path
    most_bytes: int | None = None
    least_bytes: int = 4 << 20

    @classmethod
    def chosen(cls, folder: str, most_bytes: int | None = None) -> WeightCache | None:
        """Return the cache that the options request; None if nothing is to be kept."""
        if folder == "off":
            return None
        path = Path(folder).expanduser() if folder else user_cache() / "weights"
        return cls(path, most_bytes)

    def find(self, key: str) -> Entry | None:
        """Return the weights of this key, and mark them as used: less recently used files are
        deleted first. A damaged file is deleted, even if a thread that reads all bytes finds the
        damage later. Partial files of ended processes are deleted, too."""
        path = self._path(key)
        try:
            self._delete_parts()
            if path.stat().st_uid not in (os.getuid(), 0):  # only a trusted user's file
                log.warning(
                    "packed weights are neither used nor kept: %s is another user's; "
                    "--weight-cache names a folder of your own",
                    path,
                )
                return None
            found = Entry.read(path)
            with suppress(OSError):
                os.utime(path)  # many systems do not record reads
        except DamagedEntry as error:
            log.warning("packed weights are made again: %s", error)
            with suppress(OSError):
                path.unlink()
            return None
        except OSError:
            return None
        # No daemon: the thread ends by itself, with the main thread, and not inside C code.
        threading.Thread(target=_verify, args=(found,), name="weights").start()
        return found

    def keep(
        self, key: str, packed: PackedWeights, model: str, embedding: str | None
    ) -> threading.Thread:
        """Write weights for later starts, on a thread that ends with the process. An incomplete
        file is never visible. Failures are logged."""

        def write() -> None:
            try:
                self._write(key, packed, model, embedding)
            except OSError as error:
                log.warning("packed weights are not kept for the next start: %s", error)

        thread = threading.Thread(target=write, name="weights", daemon=True)
        thread.start()
        return thread

    def files(self) -> list[CacheFile]:
        """List the folder's entries, the one used last at the end."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # deleted by another process
                about = path.stat()
                found.append(CacheFile(path, about.st_size, about.st_mtime))
        return sorted(found, key=lambda one: (one.used, one.path))

    def clear(self) -> int:
        """Delete all entries, and return their bytes. Running engines keep their mapped weights."""
        return sum(self._delete(one) for one in self.files())

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
        for path in [*self.folder.glob(f"*{PART}")]:
            with suppress(OSError), _locked(path) as left:  # left by an ended process
                if left is not None:
                    path.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Delete the least recently used files until there is room; False: `size` is too large."""
        files = self.files()
        taken, limit = sum(one.size for one in files), self.most_bytes
        if limit is None:
            limit = (shutil.disk_usage(self.folder).free + taken) // SHARE
        if size > limit:
            log.info(
                "packed weights are not kept for the next start: they take %.1f GiB, and %s may "
                "take %.1f",
                *(size / 2**30, self.folder, limit / 2**30),
            )
            return False
        for one in files:
            if taken + size > limit:
                taken -= self._delete(one)
        return True

    def _delete(self, one: CacheFile) -> int:
        """Delete a file; return the freed bytes."""
        try:
            one.path.unlink(missing_ok=True)
        except PermissionError:  # another user's file
            return 0
        return one.size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


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
    """Open and lock a file for this process, and empty it; None if another process has the lock.
    Raises OSError for a link, whose target is not emptied."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been renamed or deleted between open and lock.
            mine = os.fstat(file.fileno()).st_ino == path.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if mine:
            file.truncate(0)
        yield file if mine else None
