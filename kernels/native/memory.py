"""Memory in huge pages, where the system gives them: for large arrays, read in order or not."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def mapped(size: int) -> Tensor:
    """`size` bytes (uint8), zero, aligned to `HUGE_PAGE`. What is never touched costs no memory.

    They live as long as the tensor does, and are all of its storage. Raises OSError if the system
    has no room for them.
    """
    # Private and anonymous: shared memory gets huge pages on few systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    if not size:  # a buffer must not be empty
        return whole[begin:begin]
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
