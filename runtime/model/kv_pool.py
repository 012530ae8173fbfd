"""Size and allocate the KV cache's memory: one tensor for all of it."""

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
from rootlace.runtime.config import ExecutorConfig, KVDtype
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.spec import Attention
from rootlace.wire.protocol import SamplingParams

if TYPE_CHECKING:
    import torch

# Main memory --------------------------------------------------------------------------------------
#
# Find the main memory that this process may take: the machine's, or its control groups' limit.


ROOT = Path(os.sep)


class MainMemory(msgspec.Struct, frozen=True):
    """Main memory, in bytes."""

    total: int
    available: int


def main_memory(root: Path = ROOT) -> MainMemory:
    """Return the machine's memory or, if smaller, that of the tightest control group around this
    process (read below `root`): the system kills a process that exceeds it."""
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
            # Cached pages of files count as used, but make room when needed.
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
"""Bytes of one captured graph besides memory that graphs share: its nodes and their arguments."""
SPARE_SHARE = 0.02
"""Share of the device's memory that stays free: the allocator rounds up and splits, libraries load
late, and other programs start."""

_RANDOM = SamplingParams(temperature=1.0, seed=0)
_GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=True)


def kv_bytes(free: int, total: int, step_bytes: int, graphs: int) -> int:
    """Return the bytes for the KV cache on a device with `free` of `total` bytes left. A step takes
    up to `step_bytes`, and `graphs` graphs may be captured. Graphs share memory among themselves,
    but not with steps that are launched kernel by kernel. A decode step needs at most a quarter of
    the largest step's memory."""
    reserve = graphs * GRAPH_BYTES + (step_bytes // 4 if graphs else 0)
    return int(free - step_bytes - reserve - SPARE_SHARE * total)


def measured(run: Callable[[], None], device: torch.device) -> int:
    """Return the bytes of GPU memory that the allocator reserves for `run`, at its peak."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def free_memory(device: torch.device | str) -> tuple[int, int]:
    """Return (free, total) bytes of the device, with nothing kept for later allocations."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def trial_steps(
    vocab_size: int, max_tokens: int, max_rows: int, context_length: int, block_size: int
) -> tuple[list[StepPlan], int]:
    """Make trial steps of random tokens; return them, and the number of blocks that they use.

    Together the steps need the most of everything. Prompts have as many tokens as fit, and one
    prompt is scored. As many rows as may run each sample in the most expensive way. The other steps
    need less, but kernels are compiled separately for each way to sample, for a single row, and for
    few rows (whose tiles are smaller). The last two are a first request's first steps.
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
    """Spread tokens evenly over rows."""
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
    """Make a plan of rows of random new tokens, with nothing before them."""
    rows = [rng.integers(0, vocab_size, count, np.int32) for count in lengths]
    samples = [SampleRow(at, params, row, len(row)) for at, row in enumerate(rows)]
    scores = [PromptScoreRow(0, 0, rows[0], 1)] if scored else []
    return plan_of_rows(rows, block_size, samples=samples, prompt_scores=scores)


def plan_of_rows(
    rows: Sequence[np.ndarray], block_size: int, begin: int = 0, **further: Any
) -> StepPlan:
    """Plan a step of rows of new tokens, each behind `begin` tokens and in its own consecutive
    blocks. `further`: the plan's further fields."""
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
"""Largest share of the available main memory that the cache takes by default."""
CPU_LIMIT = 4 * GIB
FULL_CONTEXTS = 64
"""Number of full contexts that suffice for a CPU pool."""


DType = np.dtype[Any]
BYTES, UINT4 = np.dtype(np.uint8), np.dtype(ml_dtypes.uint4)
STORED = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "int8": BYTES, "int4": UINT4}
BITS = {BYTES: 8, UINT4: 4}
"""Bits of the integers in a cache of these types."""


def storage_dtype(kv_dtype: KVDtype, dtype: DType) -> DType:
    """Return the dtype of the stored keys and values of a model of `dtype`."""
    return STORED.get(kv_dtype, dtype)


def balances_keys(executor: ExecutorConfig) -> bool:
    """Return whether keys are read with channels of like sizes (`loader.balanced`), as adapters are
    not."""
    return executor.kv_dtype in ("int8", "int4") and not executor.adapters


def codes(attention: Attention, dtype: DType) -> KVCodes | None:
    """Return the integers that a cache of `dtype` holds; None: the cache holds floats."""
    bits = BITS.get(dtype)
    return None if bits is None else KVCodes(bits, attention.num_kv_heads)


def block_bytes(config: ModelConfig, block_size: int, dtype: DType) -> int:
    """Return the bytes of one block over all layers, keys and values."""
    attention = config.spec.attention
    slot, element = _slot(attention, dtype)
    return (
        attention.cached * config.spec.num_layers * block_size * math.prod(slot) * element.itemsize
    )


def bytes_per_number(attention: Attention, dtype: DType) -> float:
    """Return the bytes of one cached number of a key or value, with its share of scales."""
    slot, element = _slot(attention, dtype)
    return math.prod(slot) * element.itemsize / (attention.num_kv_heads * attention.head_dim)


def _slot(attention: Attention, dtype: DType) -> tuple[tuple[int, int], DType]:
    """Return axes and elements' dtype of a slot's keys, or values, in a layer."""
    heads, dim = attention.num_kv_heads, attention.head_dim
    if dtype in BITS:
        return (1, slot_bytes(BITS[dtype], heads, dim)), BYTES
    return (heads, dim), dtype


def allocate(config: ModelConfig, num_blocks: int, block_size: int, dtype: DType) -> np.ndarray:
    """Allocate the cache in main memory, in its `shape_of`, uninitialised.

    The memory is not cleared on purpose: slots are read only after they were written, and pages
    that are never written cost no memory. Pages are huge if the system has huge pages: blocks lie
    all over the cache, and attention would otherwise look up a page for each. The first blocks have
    small pages: one token would commit a huge page for each layer's keys and values. Raises OSError
    if memory is too small.
    """
    shape, element = shape_of(config, num_blocks, block_size, dtype)
    memory = mapped(math.prod(shape) * element.itemsize, math.prod(shape[:2]))
    return memory.view(element).reshape(shape)


def shape_of(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: DType
) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of the cache: [layers, 2, num_blocks, block_size, kv_heads, head_dim],
    or [layers, 1, ...] if values are a part of the keys. Integers are rows of bytes, [layers, 2,
    num_blocks, block_size, 1, row] (`kernels/reference/kv_cache.py`)."""
    attention = config.spec.attention
    slot, element = _slot(attention, dtype)
    return (config.spec.num_layers, attention.cached, num_blocks, block_size, *slot), element
