"""One model's packed weights in a file that can be mapped.

Arrays, each at a multiple of `LINE` bytes; then a table of them; then what checks both, `TRAILER`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from rootlace.kernels.native import library as native
from rootlace.kernels.native.linear import LINE, Packed, ProductPath
from rootlace.runtime.model.decoder.packed_weights import PackedWeights
from rootlace.runtime.model.weight_cache.key import SAMPLE, samples

TRAILER = struct.Struct("<32sQ16s")
"""SHA-256 of the table and of samples of the arrays, the table's bytes, `MAGIC`."""
MAGIC = b"rootlace packed3"
AT_ONCE = 64 << 20
"""Bytes that are written before they are sent to the disk, since what waits there takes memory; and
that are checked before anybody asks whether that is still wanted."""
DTYPES = {"u8": torch.uint8, "i32": torch.int32, "f32": torch.float32, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DamagedEntry(Exception):
    """A file is not what was written."""


class Array(msgspec.Struct, array_like=True):
    begin: int
    dtype: str
    shape: tuple[int, ...]
    crc: int
    """CRC-32 of its bytes: more than twice as fast as the cryptographic digests of `hashlib`."""

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Linear(msgspec.Struct, array_like=True):
    """A `Packed`."""

    memory: Array
    outputs: int
    inputs: int
    bias: Array | None
    order: Array | None
    schemes: bytes
    """Of codes, as C has them; empty: none."""
    path: ProductPath

    @property
    def arrays(self) -> Iterator[Array]:
        return (one for one in (self.memory, self.bias, self.order) if one is not None)


class Table(msgspec.Struct, array_like=True):
    model: str
    embedding: str | None
    """The tensor of the checkpoint's file that the embedding is; None: it is among `tensors`."""
    arrays: int
    """Bytes of all arrays."""
    tensors: dict[str, Array]
    linears: dict[str, tuple[Linear, ...]]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A file that was mapped to be read only: it may be deleted, but not be written to."""

    path: Path
    table: Table
    memory: mmap.mmap
    damage: threading.Event = field(default_factory=threading.Event)
    """Set when `verify` finds that an array is not what was written."""

    @classmethod
    def read(cls, path: Path) -> Entry:
        """Raises OSError where there is none, `DamagedEntry` for one that was not written whole."""
        with path.open("rb") as file:
            try:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise DamagedEntry(f"{path}: {error}") from error
        try:
            digest, size, magic = TRAILER.unpack(memory[-TRAILER.size :])
            end = len(memory) - TRAILER.size
            table = memory[max(end - size, 0) : end]
            found = msgspec.msgpack.decode(table, type=Table) if magic == MAGIC else None
        except (struct.error, msgspec.DecodeError) as error:
            raise DamagedEntry(f"{path}: {error}") from error
        if found is None or found.arrays + size != end or _digest(memory, found, table) != digest:
            raise DamagedEntry(f"{path}: it is not whole")
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(path, found, memory)

    def packed(self, embedding: torch.Tensor | None) -> PackedWeights:
        """`embedding`: that of the checkpoint, where the table names it."""
        tensors = {name: self._tensor(array) for name, array in self.table.tensors.items()}
        if embedding is not None:
            tensors["embedding"] = embedding
        linears = {
            name: tuple(map(self._linear, parts)) for name, parts in self.table.linears.items()
        }
        return PackedWeights(linears, tensors, self.table.remarks, self.table.arrays, self.damage)

    def verify(self) -> None:
        """Compare all arrays with their checksums, which also has the system read what is not in
        memory yet. Ends with the main thread. Others may use the interpreter meanwhile. Raises
        `DamagedEntry`, with `damage` set."""
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

    def _linear(self, linear: Linear) -> Packed:
        schemes = None
        if linear.schemes:
            count = len(linear.schemes) // ctypes.sizeof(native.Scheme)
            schemes = (native.Scheme * count).from_buffer_copy(linear.schemes)
        bias = None if linear.bias is None else self._tensor(linear.bias)
        order = None if linear.order is None else self._tensor(linear.order)
        memory = self._tensor(linear.memory)
        shape = (linear.outputs, linear.inputs)
        return Packed(memory, *shape, bias, order, schemes, linear.path)

    def _tensor(self, array: Array) -> torch.Tensor:
        with warnings.catch_warnings():
            # torch cannot mark a tensor as read-only, and says so.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            found = torch.frombuffer(
                self.memory,
                dtype=DTYPES[array.dtype],
                count=math.prod(array.shape),
                offset=array.begin,
            )
        return found.view(array.shape)


def write_entry(file: BinaryIO, packed: PackedWeights, model: str, embedding: str | None) -> None:
    """Write all of `packed`, but no embedding that the checkpoint has under the name `embedding`,
    and have it sent to the disk. `file` is empty and not buffered."""
    writer = _Writer(file)
    tensors = {
        name: writer.array(tensor)
        for name, tensor in packed.tensors.items()
        if embedding is None or name != "embedding"
    }
    linears = {name: tuple(map(writer.linear, parts)) for name, parts in packed.linears.items()}
    writer.align()
    table = Table(model, embedding, writer.at, tensors, linears, packed.remarks)
    data = msgspec.msgpack.encode(table)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        digest = _digest(memory, table, data)
    file.write(data + TRAILER.pack(digest, len(data), MAGIC))
    os.fsync(file.fileno())


def entry_bytes(packed: PackedWeights) -> int:
    """About the size of the file."""
    linears = [part for parts in packed.linears.values() for part in parts]
    biases = [part.bias for part in linears if part.bias is not None]
    arrays = [*packed.tensors.values(), *biases, *(part.memory for part in linears)]
    return sum(array.nbytes + LINE for array in arrays)


def _digest(memory: mmap.mmap, table: Table, data: bytes) -> bytes:
    digest = hashlib.sha256(data)
    for sample in samples(table.arrays, lambda at: memory[at : at + SAMPLE]):
        digest.update(sample)
    return digest.digest()


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.at = 0
        self._unsent = 0

    def linear(self, packed: Packed) -> Linear:
        return Linear(
            self.array(packed.memory),
            packed.outputs,
            packed.inputs,
            None if packed.bias is None else self.array(packed.bias),
            None if packed.order is None else self.array(packed.order),
            b"" if packed.schemes is None else bytes(packed.schemes),
            packed.path,
        )

    def array(self, tensor: torch.Tensor) -> Array:
        self.align()
        start, crc = self.at, 0
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), AT_ONCE):
            piece = data[begin : begin + AT_ONCE]
            crc = zlib.crc32(piece, crc)
            self._write(piece)
        return Array(start, _NAMES[tensor.dtype], tuple(tensor.shape), crc)

    def align(self) -> None:
        self._write(memoryview(bytes(-self.at % LINE)))

    def _write(self, data: memoryview) -> None:
        while data:
            written = self._file.write(data)
            self.at += written
            self._unsent += written
            data = data[written:]
        if self._unsent >= AT_ONCE:
            os.fdatasync(self._file.fileno())
            self._unsent = 0
