"""From positions to slots, in kernels that loop over tiles of a row's positions.

Keys can only be asked for once it is known where they are. A loop that reads the table and then the
keys of the same tile is pipelined at half the depth, as the compiler has to overlap both. So blocks
are read one tile ahead:

    begin = first_tile(first, BLOCK_SIZE, BLOCK_N)
    block = blocks_of(table, begin, last, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        slot = slots_of(block, position, BLOCK_SIZE)
        block = blocks_of(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
        ...
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_tile(first, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where tiles that cover `first` begin: where they fit into blocks, none lies in two."""
    return first // BLOCK_N * BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else first


@triton.jit
def blocks_of(table, start, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of the positions start : start + BLOCK_N; 0 from `last` on.

    One number for all if tiles fit into blocks. `table`: where that of position 0 would be.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        position = start + tl.arange(0, BLOCK_N)
        index = position.to(tl.uint32) // BLOCK_SIZE  # a shift, where a signed one is four steps
        block = tl.load(table + index.to(tl.int32), mask=position < last, other=0)
    return block


@triton.jit
def slots_of(block, position, BLOCK_SIZE: tl.constexpr):
    """int64: a layer's cache may have more than 2^31 elements."""
    inside = position.to(tl.uint32) % BLOCK_SIZE
    return block.to(tl.int64) * BLOCK_SIZE + inside.to(tl.int32)
