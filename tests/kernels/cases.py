"""Attention cases for any device: ragged rows in random blocks, NaN wherever nothing may be read.

The same cases are run on small shapes by Triton's interpreter and on real ones by a GPU
(`tests/kernels/triton`, `tests/gpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import AttentionBatch, KVCodes, KVScales, KVScaling
from rootlace.kernels.reference.kv_cache import dequantise, quantise

FP8 = torch.float8_e4m3fn
INTEGERS = {torch.uint8: 8, torch.uint4: 4}  # type: ignore[attr-defined]
EXACT_BYTES = 1 << 28
"""Scores that the exact formula holds at once, float64."""


class AttentionCase(msgspec.Struct, frozen=True):
    """What is attended. `rows` are (new tokens, context) each, new ones included.

    `shared` are (first row, behind the last, tokens), outer before inner: these rows have the
    blocks of their first `tokens` tokens (whole blocks) in common.
    """

    rows: tuple[tuple[int, int], ...]
    block_size: int = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float = 0.0
    scale: float | None = None
    shared: tuple[tuple[int, int, int], ...] = ()


class AttentionTensors(msgspec.Struct, frozen=True):
    """A case on a device. Slots that hold no token of a row are NaN in both caches."""

    case: AttentionCase
    batch: AttentionBatch
    q: torch.Tensor  # [T, Nq, D]
    k_cache: torch.Tensor  # [B, S, Nk, D], or of integers [B, S, 1, W]
    v_cache: torch.Tensor
    scales: KVScaling | None

    def options(self) -> dict[str, object]:
        """The keyword arguments of `paged_attention`."""
        return {
            "scale": self.case.scale,
            "soft_cap": self.case.soft_cap,
            "scales": self.scales,
        }

    def plain(self) -> AttentionTensors:
        """The same over a cache of the numbers that integers stand for."""
        assert isinstance(self.scales, KVCodes)
        heads, dim = self.case.heads[1], self.case.head_dim
        caches = [
            dequantise(
                cache.flatten(0, 1).flatten(1), self.scales.bits, heads, dim, self.q.dtype
            ).view(*cache.shape[:2], heads, dim)
            for cache in (self.k_cache, self.v_cache)
        ]
        return replace(self, k_cache=caches[0], v_cache=caches[1], scales=None)

    def alone(self, row: int) -> AttentionTensors:
        """Return one row of the batch alone, over the same memory."""
        start, stop = int(self.batch.row_start[row]), int(self.batch.row_start[row + 1])
        batch = replace(
            self.batch,
            row_start=np.array([0, stop - start], np.int32),
            context_len=self.batch.context_len[row : row + 1],
            block_tables=self.batch.block_tables[row : row + 1],
        )
        return replace(self, batch=batch, q=self.q[start:stop])


def make_attention(case: AttentionCase, device: torch.device, seed: int = 0) -> AttentionTensors:
    """Random queries, keys and values (normal, deviation 1.5) in blocks of random order."""
    random = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    size, dim, kv_heads = case.block_size, case.head_dim, case.heads[1]
    lengths = np.array([new for new, _ in case.rows], np.int32)
    context = np.array([context for _, context in case.rows], np.int32)
    tables, num_blocks = _tables(case, context, random)
    kv_dtype = case.kv_dtype or case.dtype
    wide = torch.full((2, num_blocks * size, kv_heads, dim), float("nan"), device=device)
    used = torch.from_numpy(_used_slots(tables, context, size)).to(device)
    shape = (2, len(used), kv_heads, dim)
    wide[:, used] = torch.randn(shape, generator=generator, device=device) * 1.5
    scales: KVScaling | None = None
    if kv_dtype == FP8:
        k, v = torch.rand((2, kv_heads), generator=generator, device=device) * 0.02 + 0.005
        scales = KVScales(k, v)
        wide = (wide / torch.stack((k, v))[:, None, :, None]).clamp(-448, 448)
    if kv_dtype in INTEGERS:
        scales = KVCodes(INTEGERS[kv_dtype], kv_heads)
        cache = torch.stack([quantise(part, scales.bits) for part in wide])
        cache = cache.view(2, num_blocks, size, 1, -1)
    else:
        cache = wide.to(kv_dtype).view(2, num_blocks, size, kv_heads, dim)
    q = torch.randn((int(lengths.sum()), case.heads[0], dim), generator=generator, device=device)
    batch = AttentionBatch(
        row_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_len=context,
        block_tables=tables,
        block_size=size,
        num_heads=case.heads[0],
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=case.dtype,
        device=device,
    )
    return AttentionTensors(case, batch, (q * 1.5).to(case.dtype), cache[0], cache[1], scales)


def _tables(
    case: AttentionCase, context: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Block tables [R, W] in random order, -7 behind each row's last, and how many blocks."""
    needed = -(-context // case.block_size)
    num_blocks = int(needed.sum()) + 3
    free = random.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(context), int(needed.max()) + 1), -7, np.int32)
    taken = 0
    for row, count in enumerate(needed.tolist()):
        tables[row, :count] = free[taken : taken + count]
        taken += count
    for first, stop, tokens in case.shared:
        if tokens % case.block_size or tokens > context[first:stop].min():
            raise ValueError(f"rows {first}:{stop} cannot share {tokens} tokens")
        blocks = tokens // case.block_size
        tables[first:stop, :blocks] = tables[first, :blocks]
    return tables, num_blocks


def _used_slots(tables: np.ndarray, context: np.ndarray, size: int) -> np.ndarray:
    parts = [row_slots(tables[row], 0, int(count), size) for row, count in enumerate(context)]
    return np.unique(np.concatenate(parts))


def row_slots(table: np.ndarray, low: int, high: int, size: int) -> np.ndarray:
    """The slots of positions `low : high`."""
    positions = np.arange(low, high)
    return table[positions // size].astype(np.int64) * size + positions % size


def exact_attention(tensors: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of `kernels/reference/attention.py` in float64, each row by itself:
    out [T, Nq, D], lse [T, Nq]."""
    batch, case = tensors.batch, tensors.case
    heads, dim = tensors.q.shape[1:]
    kv_heads = batch.num_kv_heads
    scale = dim**-0.5 if case.scale is None else case.scale
    outs, sums = [], []
    for row in range(len(batch.context_len)):
        start, stop = int(batch.row_start[row]), int(batch.row_start[row + 1])
        context = int(batch.context_len[row])
        slots = torch.from_numpy(row_slots(batch.block_tables[row], 0, context, batch.block_size))
        k, v = _stored(tensors, slots.to(tensors.q.device))  # [Nk, S, D]
        chunk = max(EXACT_BYTES // (8 * heads * context), 1)
        for begin in range(start, stop, chunk):
            end = min(begin + chunk, stop)
            q = tensors.q[begin:end].double().view(end - begin, kv_heads, heads // kv_heads, dim)
            scores = torch.einsum("tkgd,ksd->tkgs", q, k) * scale
            if case.soft_cap > 0:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            position = torch.arange(begin, end, device=q.device) + (context - stop)
            place = torch.arange(context, device=q.device)
            visible = place <= position[:, None]
            if case.window is not None:
                visible &= place > position[:, None] - case.window
            scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
            out = torch.einsum("tkgs,ksd->tkgd", scores.softmax(-1), v)
            outs.append(out.reshape(end - begin, heads, dim))
            sums.append(scores.logsumexp(-1).reshape(end - begin, heads))
    return torch.cat(outs), torch.cat(sums)


def _stored(tensors: AttentionTensors, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of some slots as read from the cache, float64 [Nk, S, D]."""
    found = []
    for name, cache in (("k", tensors.k_cache), ("v", tensors.v_cache)):
        flat, scales = cache.view(-1, *cache.shape[2:]), tensors.scales
        if isinstance(scales, KVCodes):
            rows = flat.index_select(0, slots).flatten(1)
            dim, dtype = tensors.q.shape[2], tensors.q.dtype
            values = dequantise(rows, scales.bits, scales.heads, dim, dtype).double()
        elif cache.dtype == FP8:  # torch does not gather float8 on every device
            values = flat.view(torch.uint8).index_select(0, slots).view(FP8).double()
        else:
            values = flat.index_select(0, slots).double()
        if isinstance(scales, KVScales):
            values = values * getattr(scales, name).double()[:, None]
        found.append(values.transpose(0, 1))
    return found[0], found[1]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that torch hands out uninitialised is NaN (the largest number, for integers):
    what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinite where `found` is not finite."""
    wide = found.double()
    if not bool(wide.isfinite().all()):
        return float("inf")
    return float((wide - exact).norm() / exact.norm().clamp_min(1e-30))


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the struct `value` with every tensor changed, including tensors in mappings."""

    def changed(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: changed(each) for name, each in part.items()}
        return change(part) if isinstance(part, torch.Tensor) else part

    return replace(
        value, **{name: changed(part) for name, part in msgspec.structs.asdict(value).items()}
    )
