"""The pool of KV blocks: reference counts and free blocks."""

from __future__ import annotations

import numpy as np


class PoolExhausted(RuntimeError):
    """Raised when more blocks are allocated than are free; the caller did not make room first."""


class BlockPool:
    """Reference counts over `num_blocks` blocks of `block_size` slots; the KV itself lies
    elsewhere.

    Two counts per block, int32 arrays of shape [num_blocks]:

    - `refs`: tree nodes and sequences that refer to the block. A block with 0 is free.
    - `pins`: references that need the block now (locked nodes, and all sequences). A block with
     `refs > 0` and `pins == 0` is held by unlocked nodes alone: eviction can free the block.

    `evictable` counts such blocks, kept up to date by every operation. All operations take arrays
    of *distinct* block ids and cost O(len(array)) in NumPy. NumPy converts int32 indices at each
    use, so each operation converts its ids once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of one slot, not {num_blocks} x {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Forget every reference: all blocks are free."""
        self.refs = np.zeros(self.num_blocks, np.int32)
        self.pins = np.zeros(self.num_blocks, np.int32)
        # A stack: the block freed last is handed out first. Block 0 starts on top.
        self._stack = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self.free = self.num_blocks
        self.evictable = 0

    def allocate(self, count: int) -> np.ndarray:
        """Allocate `count` free blocks (int32), each with one reference and one pin."""
        if count > self.free:
            raise PoolExhausted(f"{count} blocks wanted, {self.free} free")
        self.free -= count
        blocks = self._stack[self.free : self.free + count].copy()
        at = blocks.astype(np.intp)
        self.refs[at] = 1
        self.pins[at] = 1
        return blocks

    def retain(self, blocks: np.ndarray, *, pinned: bool) -> None:
        """Add a reference to each of `blocks`, which are not free."""
        at = blocks.astype(np.intp)
        self.refs[at] += 1
        if pinned:
            self.pin(at)

    def drop(self, blocks: np.ndarray, *, pinned: bool) -> int:
        """Remove a reference (and its pin) from each of `blocks`; return the count freed."""
        if not len(blocks):
            return 0
        at = blocks.astype(np.intp)
        if pinned:
            self.unpin(at)
        left = self.refs[at] - 1
        self.refs[at] = left
        gone = blocks[left == 0]
        count = len(gone)
        if count:
            self._stack[self.free : self.free + count] = gone
            self.free += count
            self.evictable -= count
        return count

    def pin(self, blocks: np.ndarray) -> None:
        """Pin one more of the references to each of `blocks`."""
        at = blocks.astype(np.intp, copy=False)
        before = self.pins[at]
        self.pins[at] = before + 1
        self.evictable -= len(before) - int(np.count_nonzero(before))

    def unpin(self, blocks: np.ndarray) -> None:
        at = blocks.astype(np.intp, copy=False)
        left = self.pins[at] - 1
        self.pins[at] = left
        self.evictable += len(left) - int(np.count_nonzero(left))

    @property
    def available(self) -> int:
        """Blocks that are free or can be freed by eviction."""
        return self.free + self.evictable

    def check(self, refs: np.ndarray, pins: np.ndarray) -> None:
        """Compare with counts recomputed from the owners; AssertionError names the first fault."""
        for name, actual, expected in (("refs", self.refs, refs), ("pins", self.pins, pins)):
            wrong = np.flatnonzero(actual != expected)
            if len(wrong):
                block = int(wrong[0])
                raise AssertionError(
                    f"block {block} has {name} {actual[block]}, expected {expected[block]}"
                )
        free = self._stack[: self.free]
        assert len(np.unique(free)) == self.free, "a block is in the free list twice"
        assert not refs[free].any(), "a block in the free list is referred to"
        assert self.free == int(np.count_nonzero(refs == 0)), "a block is lost"
        evictable = int(np.count_nonzero((refs > 0) & (pins == 0)))
        assert self.evictable == evictable, f"evictable {self.evictable}, should be {evictable}"
