"""Random rows in a paged cache, and attention planned over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rootlace.kernels.interface import AttentionBatch, KernelSet, KVCodes, KVScales, KVScaling
from rootlace.kernels.reference.kv_cache import quantise
from rootlace.runtime.model.kv_pool import BITS

BLOCK_SIZE = 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
INT8, INT4 = BITS


@dataclass(frozen=True)
class HeadShape:
    """Query heads, key heads and head size."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Paged:
    """A batch with its tensors. `q` [T, Nq, D], caches [B, S, Nk, D], of integers [B, S, 1, W]."""

    batch: AttentionBatch
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: KVScaling | None

    def decode_bytes(self) -> int:
        """Return the least bytes of attention: every key and value once, queries, outputs."""
        distinct = np.unique(self.batch.block_tables[self.batch.block_tables >= 0])
        tokens = min(len(distinct) * self.batch.block_size, int(self.batch.context_len.sum()))
        stored = self.k_cache[0, 0].nbytes + self.v_cache[0, 0].nbytes
        return tokens * stored + 2 * self.q.nbytes


def make_paged(
    rows: Sequence[tuple[int, int]],
    shape: HeadShape,
    device: torch.device,
    *,
    kv_dtype: torch.dtype = BF16,
    prefix: int = 0,
    seed: int = 0,
) -> Paged:
    """Make bfloat16 queries of `rows` (new tokens, context), with blocks in random order. All rows
    share the blocks of their first `prefix` tokens (whole blocks)."""
    random = np.random.default_rng(seed)
    context = np.array([context for _, context in rows], np.int32)
    needed = -(-context // BLOCK_SIZE)
    shared = prefix // BLOCK_SIZE
    num_blocks = int((needed - shared).sum()) + shared
    order = random.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(rows), int(needed.max())), -1, np.int32)
    tables[:, :shared] = order[:shared]
    taken = shared
    for row, count in enumerate(needed.tolist()):
        tables[row, shared:count] = order[taken : taken + count - shared]
        taken += count - shared
    generator = torch.Generator(device).manual_seed(seed)
    size = (num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    bits = BITS.get(kv_dtype)
    numbers = BF16 if bits else kv_dtype
    caches = [_random(size, numbers, device, generator) for _ in range(2)]
    if bits:
        stored = [quantise(cache.flatten(0, 1), bits) for cache in caches]
        caches = [cache.view(num_blocks, BLOCK_SIZE, 1, -1) for cache in stored]
    starts = np.cumsum([0, *(new for new, _ in rows)]).astype(np.int32)
    q = _random((int(starts[-1]), shape.heads, shape.head_dim), BF16, device, generator)
    scales: KVScaling | None = KVCodes(bits, shape.kv_heads) if bits else None
    if kv_dtype == FP8:
        scales = KVScales(*(torch.full((shape.kv_heads,), 0.02, device=device) for _ in range(2)))
    batch = AttentionBatch(
        row_start=starts,
        context_len=context,
        block_tables=tables,
        block_size=BLOCK_SIZE,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=BF16,
        device=device,
    )
    return Paged(batch, q, caches[0], caches[1], scales)


def _random(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Make normal numbers (for fp8 in the range of scaled ones), in parts, since they pass through
    float32."""
    out = torch.empty(size, dtype=dtype, device=device)
    spread = 50.0 if dtype == FP8 else 1.0
    flat = out.view(-1)
    step = 1 << 26
    for start in range(0, len(flat), step):
        count = min(step, len(flat) - start)
        part = torch.randn(count, generator=generator, device=device) * spread
        flat[start : start + count] = part.to(dtype)
    return out


def bound_plan(kernels: KernelSet, batch: AttentionBatch) -> Any:
    """Return the arguments of `paged_attention` on the device, planned as the executor plans,
    decode rows as in a captured graph."""
    decoding = bool((np.diff(batch.row_start) == 1).all())
    rows = len(batch.context_len) if decoding and kernels.name != "reference" else None
    plan = kernels.plan_attention(batch, None, rows)
    return plan.bind([torch.from_numpy(array).to(batch.device) for array in plan.arrays])


def attend(kernels: KernelSet, paged: Paged, plan: Any = None) -> Callable[[], object]:
    """Return a call of our attention, by `plan` or the usual one."""
    tensors = (paged.q, paged.k_cache, paged.v_cache, plan or bound_plan(kernels, paged.batch))
    return lambda: kernels.paged_attention(*tensors, scales=paged.scales)
