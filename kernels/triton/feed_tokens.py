"""Tokens that the step before found, put in their places: `reference/layers.py`.

In a decode step every token may be one of them. A launch takes longer than the few hundred numbers;
as torch operations there would be six.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.variants import Variant

BLOCK = 256


@triton.jit
def feed_tokens_kernel(ids_ptr, feeds_ptr, found_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    feed = tl.load(feeds_ptr + index, mask=inside, other=-1)
    given = tl.load(ids_ptr + index, mask=inside, other=0)
    found = tl.load(found_ptr + feed, mask=feed >= 0, other=0).to(tl.int64)
    tl.store(out_ptr + index, tl.where(feed >= 0, tl.maximum(found, 0), given), mask=inside)


def feed_tokens(token_ids: torch.Tensor, feeds: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """token_ids, feeds int64 [T], found int32 [S], each contiguous -> int64 [T]. Feeds must be
    below S: nothing checks them on the device."""
    out = torch.empty_like(token_ids)
    count = len(token_ids)
    if count:
        feed_tokens_kernel[(triton.cdiv(count, BLOCK),)](
            token_ids, feeds, found, out, count, BLOCK=BLOCK, num_warps=4
        )
    return out


def variants(arch: int) -> list[Variant]:
    return [
        Variant(
            "i64",
            feed_tokens_kernel,
            {
                "ids_ptr": "*i64",
                "feeds_ptr": "*i64",
                "found_ptr": "*i32",
                "out_ptr": "*i64",
                "count": "i32",
                "BLOCK": "constexpr",
            },
            {"BLOCK": BLOCK},
            ("ids_ptr", "feeds_ptr", "found_ptr", "out_ptr"),
        )
    ]
