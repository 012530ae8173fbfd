"""The KV cache's memory: how much, and one tensor for all of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import msgspec
import numpy as np
import psutil

from rootlace.kernels.interface import KVCodes, slot_bytes
from rootlace.kernels.native.machine import control_groups, mapped, read_text
from rootlace.runtime.config import KVDtype
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.spec import Attention
from rootlace.wire.protocol import SamplingParams

if TYPE_CHECKING:
    import torch

# Main memory --------------------------------------------------------------------------------------
#
# How much main memory this process may take: what the machine has, or its control groups grant.


ROOT = Path(os.sep)


class MainMemory(msgspec.Struct, frozen=True):
    """Bytes."""

    total: int
    available: int


def main_memory(root: Path = ROOT) -> MainMemory:
    """The machine's memory or, where less is granted, that of the tightest control group around
    this process (read below `root`): whoever takes more is killed."""
    machine = psutil.virtual_memory()
    found = [MainMemory(machine.total, machine.available), *_granted(root)]
    return MainMemory(min(one.total for one in found), min(one.available for one in found))


def _granted(root: Path) -> Iterator[MainMemory]:
    for version, group in control_groups(root, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (read_text(group / name) for name in names[:2])
        if limit.isdigit() and used.isdigit():  # a group without a limit says "max"
            # Files that were read and are not in use count as used, but make room when needed.
            reclaimable = _statistic(group, names[2])
            free = int(limit) - max(int(used) - reclaimable, 0)
            yield MainMemory(int(limit), max(free, 0))


def _statistic(group: Path, name: str) -> int:
    for line in read_text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


# Device memory ------------------------------------------------------------------------------------


GRAPH_BYTES = 8 << 20
"""Memory of one captured graph besides what all of them share: its nodes and their arguments."""
SPARE_SHARE = 0.02
"""Share of the device's memory that stays free: the allocator rounds up and splits, libraries load
things late, and other programs start."""

_RANDOM = SamplingParams(temperature=1.0, seed=0)
_GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=True)


def kv_bytes(free: int, total: int, step_bytes: int, graphs: int) -> int:
    """Bytes for the KV cache on a device with `free` of `total` bytes left, where a step takes up
    to `step_bytes` and `graphs` graphs may be captured. Graphs share memory among themselves, but
    not with steps that are launched kernel by kernel; a decode step needs a quarter of the largest
    step's memory at most."""
    reserve = graphs * GRAPH_BYTES + (step_bytes // 4 if graphs else 0)
    return int(free - step_bytes - reserve - SPARE_SHARE * total)


def measured(run: Callable[[], None], device: torch.device) -> int:
    """Bytes of GPU memory that the allocator reserves for `run`, at its peak."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def free_memory(device: torch.device | str) -> tuple[int, int]:
    """(free, total) bytes of the device, nothing kept for later allocations."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def trial_steps(
    vocab_size: int, max_tokens: int, max_rows: int, context_length: int, block_size: int
) -> tuple[list[StepPlan], int]:
    """Steps of made-up tokens, and how many blocks they name.

    Together they need the most of everything: prompts of as many tokens as fit, one of them scored,
    and as many rows as may run, each with a token to be sampled in the most expensive way. The
    others need less, but kernels are compiled separately for few rows (whose tiles are smaller),
    for a single one, and for each way to sample. The last two are what a first request begins with.
    """
    rng = np.random.default_rng(0)
    cut = SamplingParams(temperature=1.0, top_k=vocab_size // 2, top_p=0.9, seed=0)
    rows = min(max_rows, max_tokens)
    prompts = _cut(max_tokens, context_length)
    first = min(19, max_tokens, context_length)
    plans = [
        made_up_plan(rng, vocab_size, prompts[:max_rows], block_size, cut, scored=True),
        made_up_plan(rng, vocab_size, _spread(max_tokens, rows, context_length), block_size, cut),
        made_up_plan(rng, vocab_size, [1] * rows, block_size, cut),
        *(
            made_up_plan(rng, vocab_size, [1] * (1 << power), block_size, _RANDOM)
            for power in range(1, (rows - 1).bit_length())
        ),
        made_up_plan(rng, vocab_size, [first], block_size, _RANDOM),
        made_up_plan(rng, vocab_size, [1], block_size, _GREEDY),
    ]
    return plans, max(int(plan.block_tables.max()) + 1 for plan in plans)


def _cut(tokens: int, length: int) -> list[int]:
    whole, rest = divmod(tokens, length)
    return [length] * whole + ([rest] if rest else [])


def _spread(tokens: int, rows: int, length: int) -> list[int]:
    """About as many tokens for each of the rows."""
    each, more = divmod(tokens, rows)
    return [min(each + (row < more), length) for row in range(rows)]


def made_up_plan(
    rng: np.random.Generator,
    vocab_size: int,
    lengths: list[int],
    block_size: int,
    params: SamplingParams,
    scored: bool = False,
) -> StepPlan:
    """Rows of so many new tokens each, with nothing before them."""
    rows = [rng.integers(0, vocab_size, count, np.int32) for count in lengths]
    samples = [SampleRow(at, params, row, len(row)) for at, row in enumerate(rows)]
    scores = [PromptScoreRow(0, 0, rows[0], 1)] if scored else []
    return plan_of_rows(rows, block_size, samples=samples, prompt_scores=scores)


def plan_of_rows(
    rows: Sequence[np.ndarray], block_size: int, begin: int = 0, **further: Any
) -> StepPlan:
    """A step of rows of new tokens, each behind `begin` tokens and in blocks of its own, which
    follow each other. `further`: what else the plan has."""
    counts = np.array([len(row) for row in rows], np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    widths = -(-(begin + counts) // block_size)
    tables = np.zeros((len(rows), int(widths.max())), np.int32)
    first = np.cumsum(widths) - widths
    for row, width in enumerate(widths.tolist()):
        tables[row, :width] = first[row] + np.arange(width)
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = begin + np.arange(len(owner)) - starts[owner]
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size
    return StepPlan(
        step=0,
        token_ids=np.concatenate(rows).astype(np.int32),
        positions=positions.astype(np.int32),
        slots=slots + positions % block_size,
        row_start=starts,
        context_len=begin + counts,
        block_tables=tables,
        **further,
    )


# Pool ---------------------------------------------------------------------------------------------


GIB = 1 << 30
CPU_SHARE = 0.25
"""Share of the available main memory that the cache takes at most, unless told."""
CPU_LIMIT = 4 * GIB
FULL_CONTEXTS = 64
"""A CPU pool that holds this many full contexts is big enough."""


DType = np.dtype[Any]
BYTES, UINT4 = np.dtype(np.uint8), np.dtype(ml_dtypes.uint4)
STORED = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "int8": BYTES, "int4": UINT4}
BITS = {BYTES: 8, UINT4: 4}
"""Bits of the integers in a cache of these types."""


def storage_dtype(kv_dtype: KVDtype, dtype: DType) -> DType:
    """How keys and values of a model of `dtype` are stored."""
    return STORED.get(kv_dtype, dtype)


def codes(attention: Attention, dtype: DType) -> KVCodes | None:
    """The integers that a cache of `dtype` holds; None: the cache holds floats."""
    bits = BITS.get(dtype)
    return None if bits is None else KVCodes(bits, attention.num_kv_heads)


def block_bytes(config: ModelConfig, block_size: int, dtype: DType) -> int:
    """Memory of one block over all layers, keys and values."""
    attention = config.spec.attention
    slot, element = _slot(attention, dtype)
    return (
        attention.cached * config.spec.num_layers * block_size * math.prod(slot) * element.itemsize
    )


def bytes_per_number(attention: Attention, dtype: DType) -> float:
    """Bytes of one number of a key or value in a cache of `dtype`, its share of scales included."""
    slot, element = _slot(attention, dtype)
    return math.prod(slot) * element.itemsize / (attention.num_kv_heads * attention.head_dim)


def _slot(attention: Attention, dtype: DType) -> tuple[tuple[int, int], DType]:
    """A slot's keys, or values, in a layer: axes and their elements' type."""
    heads, dim = attention.num_kv_heads, attention.head_dim
    if dtype in BITS:
        return (1, slot_bytes(BITS[dtype], heads, dim)), BYTES
    return (heads, dim), dtype


def allocate(config: ModelConfig, num_blocks: int, block_size: int, dtype: DType) -> np.ndarray:
    """The cache in main memory, of the `shape_of` it, uninitialised.

    Not cleared on purpose: slots are read only after they were written, and pages that are never
    written cost no memory. Its pages are huge where the system has such: blocks lie all over the
    cache, and attention would otherwise look up a page for each. The first blocks have small ones:
    a huge page for each layer's keys and values would be committed by one token. Raises OSError if
    the system has no room for it.
    """
    shape, element = shape_of(config, num_blocks, block_size, dtype)
    memory = mapped(math.prod(shape) * element.itemsize, math.prod(shape[:2]))
    return memory.view(element).reshape(shape)


def shape_of(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: DType
) -> tuple[tuple[int, ...], DType]:
    """[layers, 2, num_blocks, block_size, kv_heads, head_dim]; without room for values, where these
    are a part of the keys: [layers, 1, ...]. Of integers: bytes, in rows, [layers, 2, num_blocks,
    block_size, 1, row] (`kernels/reference/kv_cache.py`)."""
    attention = config.spec.attention
    slot, element = _slot(attention, dtype)
    return (config.spec.num_layers, attention.cached, num_blocks, block_size, *slot), element
