"""Attention of a step: decode kernels for rows with one new token, the extend kernel for others.

All kernels write to one output. A step of decode rows takes up to three launches per layer: shared
nodes (where two rows can share), each row's own parts, and the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import AttentionBatch, KVScaling
from rootlace.kernels.triton.attention_plan import (
    HEADER,
    DecodePlan,
    ExtendPlan,
    SharingRule,
    SplitRule,
    plan_decode,
    plan_extend,
    split_rule,
    tile_shapes,
)
from rootlace.kernels.triton.decode_attention import (
    decode_attention,
    tree_attention,
    tree_programs,
    tree_tile,
)
from rootlace.kernels.triton.extend_attention import extend_attention
from rootlace.kernels.triton.kv_storage import attention_inputs
from rootlace.kernels.triton.launching import architecture, padded, settings

# Merge attention ----------------------------------------------------------------------------------
#
# Second stage of decode attention: merge the partial results of each row into its output.
#
# Parts of a context have attention out_i with log-sum-exps l_i. Attention over the whole context is
#
#     out = sum_i 2^(l_i - m) out_i / sum_i 2^(l_i - m),   lse = m + log2 sum_i 2^(l_i - m)
#
# with m = max_i l_i (Dao et al. 2022, arXiv:2205.14135; here in base 2). The kernel joins the parts
# of a row in order of position, `CHUNK` at a time, independent of other rows. A program computes
# one query head of one row: it reads n (D + 1) float32 and writes D numbers of the output.


LN_2 = tl.constexpr(0.6931471805599453)
STARTS = tl.constexpr(HEADER)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["numbers"])
def merge_kernel(
    part_out,  # [P, Nq, D] float32
    part_lse,  # [P, Nq] float32, base 2
    numbers,  # see `attention_plan`
    out,  # [T, Nq, D]
    lse,  # [T, Nq] float32, natural, or nothing
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LSE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(numbers + STARTS + row)
    stop = tl.load(numbers + STARTS + row + 1)
    token = tl.load(numbers + STARTS + rows + 1 + row).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    exists = column < DIM
    if stop > start:
        acc = tl.zeros([BLOCK_D], tl.float32)
        total = 0.0
        peak = float("-inf")
        for low in range(start, stop, CHUNK):
            part = low + tl.arange(0, CHUNK)
            place = part.to(tl.int64) * HEADS + head
            log_sum = tl.load(part_lse + place, mask=part < stop, other=float("-inf"))
            value = tl.load(
                part_out + place[:, None] * DIM + column[None, :],
                mask=(part < stop)[:, None] & exists[None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(log_sum, 0))
            weight = tl.exp2(log_sum - new_peak)
            shrink = tl.exp2(peak - new_peak)
            acc = acc * shrink + tl.sum(value * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            peak = new_peak
        offset = (token * HEADS + head) * DIM
        tl.store(out + offset + column, (acc / total).to(out.dtype.element_ty), mask=exists)
        if LSE:
            tl.store(lse + token * HEADS + head, (peak + tl.log2(total)) * LN_2)
    elif token < 0:
        # A padding row's token has the row's number. Its output is defined, so that no NaN spreads.
        offset = (row.to(tl.int64) * HEADS + head) * DIM
        tl.store(out + offset + column, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=exists)
        if LSE:
            tl.store(lse + row.to(tl.int64) * HEADS + head, float("-inf"))


# Attention ----------------------------------------------------------------------------------------


MAX_HEAD_DIM = 256
"""A tile of queries and its sums are held in registers."""


class AttentionRules(msgspec.Struct, frozen=True):
    """Rules for cutting attention into work items; None: chosen by model and device."""

    split: SplitRule | None = None
    sharing: SharingRule | None = None
    tile: int | None = None


@dataclass(frozen=True)
class AttentionPlan:
    """Attention of one step on the host (`interface.HostPlan`)."""

    decode: DecodePlan | None
    extend: ExtendPlan | None
    block_tables: np.ndarray
    tile: int
    window: int | None
    device: torch.device

    @property
    def arrays(self) -> list[np.ndarray]:
        """Return the arrays for the device. The numbers of decode rows come last; with `rows` no
        others exist."""
        arrays: list[np.ndarray] = []
        if self.extend is not None:
            arrays += [self.block_tables, *self.extend.arrays]
        if self.decode is not None:
            arrays.append(self.decode.numbers)
        return arrays

    def bind(self, tensors: list[torch.Tensor]) -> BoundPlan:
        """Bind the plan to `tensors`: `arrays` on the device. The last tensor may be longer than
        its array."""
        return BoundPlan(self, tensors)


class BoundPlan(msgspec.Struct, frozen=True):
    """Plan with its arrays on the device, for `paged_attention`."""

    plan: AttentionPlan
    tensors: list[torch.Tensor]


def plan_attention(
    batch: AttentionBatch,
    window: int | None,
    rows: int | None = None,
    rules: AttentionRules | None = None,
) -> AttentionPlan:
    """Plan as `interface.PlanAttention` specifies. Raises ValueError for heads wider than
    `MAX_HEAD_DIM`. With `rows`, raises ValueError for more rows or for rows with several new
    tokens."""
    if batch.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"heads of {batch.head_dim}; at most {MAX_HEAD_DIM} are supported")
    rules = rules or AttentionRules()
    arch = architecture(batch.device)
    group = batch.num_heads // batch.num_kv_heads
    lengths = np.diff(batch.row_start)
    decode = extend = None
    tables = batch.block_tables
    padded_rows = len(lengths) if rows is None else rows
    tile = rules.tile or tree_tile(padded_rows, group, batch.head_dim, batch.dtype)
    if rows is not None or bool((lengths == 1).any()):
        programs = tree_programs(batch.device, arch, batch.head_dim, batch.dtype, tile)
        decode = plan_decode(
            batch,
            window,
            rows,
            rules.split
            or split_rule(
                batch.num_heads, batch.num_kv_heads, batch.head_dim, batch.dtype.itemsize
            ),
            rules.sharing or SharingRule(programs=programs),
            tile,
        )
    extending = np.flatnonzero(lengths > 1)
    if len(extending):
        shapes = tile_shapes(arch, batch.head_dim, group, batch.dtype)
        extend = plan_extend(batch, extending, window, shapes)
        # Only the tables of these rows are uploaded, numbered 0, 1, ...
        tables = np.ascontiguousarray(tables[extending], dtype=np.int32)
        for launch in extend.launches:
            launch.items[:, 0] = np.searchsorted(extending, launch.items[:, 0])
    return AttentionPlan(decode, extend, tables, tile, window, batch.device)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: BoundPlan,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    scales: KVScaling | None = None,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `interface.PagedAttention`. Rows added as padding (`rows`) get zeros, with a
    log-sum-exp of -inf. Raises ValueError for a cache that is not contiguous or has another dtype.
    """
    host = plan.plan
    tokens, heads, dim = q.shape
    q = q.contiguous()
    inputs = attention_inputs(q, k_cache, v_cache, scale=scale, soft_cap=soft_cap, scales=scales)
    out = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if want_lse else None
    if host.extend is not None:
        block_tables, *arrays = plan.tensors[: -1 if host.decode is not None else None]
        extend_attention(inputs, block_tables, host.extend, arrays, out, lse)
    if host.decode is None:
        return out, lse
    numbers, rows, slots = plan.tensors[-1], host.decode.rows, max(host.decode.slots, 1)
    part_out = torch.empty(slots, heads, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(slots, heads, dtype=torch.float32, device=q.device)
    if host.decode.shares:
        windowed = host.window is not None
        tree_attention(inputs, numbers, rows, host.tile, windowed, q.dtype, part_out, part_lse)
    decode_attention(inputs, numbers, host.decode.items_at, out, lse, part_out, part_lse)
    if host.decode.slots:
        launch = settings("merge_attention", architecture(q.device), head_dim=dim)
        merge_kernel[(rows, heads)](
            part_out,
            part_lse,
            numbers,
            out,
            lse,
            rows,
            HEADS=heads,
            DIM=dim,
            LSE=want_lse,
            CHUNK=launch.blocks["CHUNK"],
            BLOCK_D=padded(dim),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return out, lse
