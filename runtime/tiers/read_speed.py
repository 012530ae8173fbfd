"""How long reading a block from a disk takes, measured."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rootlace.runtime.tiers.slot_file import DamagedBlock, Kept, SlotFile

PROBE_BYTES = 32 << 20
_MOST = 32
PROBE = "probe"


def block_seconds(file: SlotFile, folder: Path, kept: Sequence[Kept]) -> float:
    """Seconds to read a block and its checksum, in no order: of those that are there or, where
    those are few, of a file made for it. At most 32 blocks and 32 MiB, at least one block. Raises
    OSError."""
    size = file.block_bytes
    count = min(max(PROBE_BYTES // size, 1), _MOST)
    order = np.random.default_rng(0)
    buffer = np.empty(size, np.uint8)
    if len(kept) >= count:
        file.forget_pages()
        chosen = [kept[at] for at in order.choice(len(kept), count, replace=False).tolist()]
        begun = time.perf_counter()
        for one in chosen:
            try:
                file.read(one.slot, one.key, buffer)
            except DamagedBlock:
                continue  # whoever wants it is told
        return (time.perf_counter() - begun) / count
    path = folder / PROBE
    probe = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        buffer[:] = np.resize(order.integers(0, 256, 65536, np.uint8), size)
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
