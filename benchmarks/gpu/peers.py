"""Other attention on the same work: torch's SDPA and flex attention, and flashinfer if it is there.

SDPA and flex attention read dense keys and values, which is easier work than a paged cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.paged import HeadShape, Paged

Call = Callable[[], object]


def dense(
    count: int, new: int, context: int, shape: HeadShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [R, Nq, new, D]; k, v [R, Nk, context, D], bfloat16."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        size = (count, heads, tokens, shape.head_dim)
        out = torch.empty(size, dtype=torch.bfloat16, device=device)
        return out.normal_(generator=generator)

    return (
        normal(shape.heads, new),
        normal(shape.kv_heads, context),
        normal(shape.kv_heads, context),
    )


def sdpa_decode(rows: int, context: int, shape: HeadShape, device: torch.device) -> Call:
    q, k, v = dense(rows, 1, context, shape, device)
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)


def sdpa_extend(new: int, context: int, shape: HeadShape, device: torch.device) -> Call:
    """Causal; a chunk behind a context sees all of it (the mask is aligned at the lower right)."""
    q, k, v = dense(1, new, context, shape, device)
    if new == context:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    # This mask has no grouped queries: keys are repeated beforehand, which costs memory, not time.
    groups = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = causal_lower_right(new, context)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_decode(rows: int, context: int, shape: HeadShape, device: torch.device) -> Call:
    q, k, v = dense(rows, 1, context, shape, device)
    flex = _compiled_flex()
    return lambda: flex(q, k, v, enable_gqa=True)


def flex_extend(new: int, context: int, shape: HeadShape, device: torch.device) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = dense(1, new, context, shape, device)
    before = context - new

    def causal(batch: Any, head: Any, token: Any, place: Any) -> Any:
        return token + before >= place

    mask = create_block_mask(causal, None, None, new, context, device=str(device))
    flex = _compiled_flex()
    return lambda: flex(q, k, v, block_mask=mask, enable_gqa=True)


def flashinfer_decode(paged: Paged, shape: HeadShape) -> Call:
    """On our own paged cache. Raises ImportError where flashinfer is not installed."""
    import flashinfer

    batch, device = paged.batch, paged.q.device
    blocks = -(-batch.context_len // batch.block_size)
    starts = np.cumsum([0, *blocks]).astype(np.int32)
    indices = np.concatenate([batch.block_tables[r, :n] for r, n in enumerate(blocks.tolist())])
    last = (batch.context_len - 1) % batch.block_size + 1
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=shape.heads // shape.kv_heads >= 4
    )
    wrapper.plan(
        torch.from_numpy(starts).to(device),
        torch.from_numpy(indices).to(device),
        torch.from_numpy(last.astype(np.int32)).to(device),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        batch.block_size,
        q_data_type=paged.q.dtype,
        kv_data_type=paged.k_cache.dtype,
    )
    return lambda: wrapper.run(paged.q, (paged.k_cache, paged.v_cache))


def flashinfer_extend(new: int, context: int, shape: HeadShape, device: torch.device) -> Call:
    import flashinfer

    q, k, v = (t[0].transpose(0, 1).contiguous() for t in dense(1, new, context, shape, device))
    return lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
