"""Second stage of decode attention: the partial results of each row become its output.

Attention over parts of a context, out_i with log-sum-exp l_i, is over the whole

    out = sum_i 2^(l_i - m) out_i / sum_i 2^(l_i - m),   lse = m + log2 sum_i 2^(l_i - m)

with m = max_i l_i (Dao et al. 2022, arXiv:2205.14135; here in base 2). The parts of a row are
joined in order of position, `CHUNK` at a time, whatever is beside it. A program does one query head
of one row; it reads n (D + 1) float32 and writes D of the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.attention_plan import HEADER
from rootlace.kernels.triton.numerics import TYPE_NAMES, padded
from rootlace.kernels.triton.tuning import settings
from rootlace.kernels.triton.variants import Variant

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
        # A row added as padding, whose token has the row's number: nothing undefined is passed on.
        offset = (row.to(tl.int64) * HEADS + head) * DIM
        tl.store(out + offset + column, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=exists)
        if LSE:
            tl.store(lse + row.to(tl.int64) * HEADS + head, float("-inf"))


def merge_attention(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    numbers: torch.Tensor,
    rows: int,
    arch: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the rows that have partial results, and zeros (log-sum-exp -inf) for empty rows.

    part_out [P, Nq, D], part_lse [P, Nq] float32 (base 2); numbers as in `attention_plan`; out
    [T, Nq, D], lse float32 [T, Nq] (natural), contiguous.
    """
    heads, dim = out.shape[1:]
    launch = settings("merge_attention", arch, head_dim=dim)
    merge_kernel[(rows, heads)](
        part_out,
        part_lse,
        numbers,
        out,
        lse,
        rows,
        HEADS=heads,
        DIM=dim,
        LSE=lse is not None,
        CHUNK=launch.blocks["CHUNK"],
        BLOCK_D=padded(dim),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def variants(arch: int) -> list[Variant]:
    """The widths in use, and one that is padded."""
    found = []
    for heads, dim, dtype, wants in (
        (32, 64, torch.bfloat16, False),
        (32, 128, torch.bfloat16, False),
        (32, 128, torch.bfloat16, True),
        (8, 256, torch.bfloat16, False),
        (32, 80, torch.float16, True),
        (32, 128, torch.float32, False),
    ):
        launch = settings("merge_attention", arch, head_dim=dim)
        constants: dict[str, object] = {
            "HEADS": heads,
            "DIM": dim,
            "LSE": wants,
            "CHUNK": launch.blocks["CHUNK"],
            "BLOCK_D": padded(dim),
        }
        signature = {
            "part_out": "*fp32",
            "part_lse": "*fp32",
            "numbers": "*i32",
            "out": f"*{TYPE_NAMES[dtype]}",
            "lse": "*fp32" if wants else "constexpr",
            "rows": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }
        if not wants:
            constants["lse"] = None
        found.append(
            Variant(
                f"{TYPE_NAMES[dtype]}, heads of {dim}{', log-sum-exp' if wants else ''}",
                merge_kernel,
                signature,
                constants,
                ("part_out", "part_lse", "out", "lse")
                if wants
                else ("part_out", "part_lse", "out"),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
            )
        )
    return found
