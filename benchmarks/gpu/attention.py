"""Attention kernels beside the device's ceilings and other implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.paged import (
    BF16,
    FP8,
    INT4,
    INT8,
    HeadShape,
    Paged,
    attend,
    bound_plan,
    make_paged,
)
from benchmarks.gpu.setting import Findings, Setting
from benchmarks.gpu.timing import OURS, Call, time_in_turns, time_rates
from benchmarks.random_models import CONFIGS
from rootlace.kernels.interface import KernelSet

LONG = 4096
"""Contexts from here on count for the targets."""
MANY_ROWS = 16
"""Decode cases with fewer rows are too small to fill a GPU; they count for no target."""

SHAPES = {
    name: HeadShape(shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])
    for name, shape in CONFIGS.items()
    if {"num_key_value_heads", "head_dim"} <= shape.keys()
}

# Shape, rows, context, cache:
DECODE_CASES = [
    ("8B", 64, 4096, BF16),
    ("8B", 64, 8192, BF16),
    ("8B", 16, 32768, BF16),
    ("1B", 64, 8192, BF16),
    ("8B", 64, 8192, FP8),
    ("8B", 64, 8192, INT8),
    ("8B", 64, 8192, INT4),
    ("8B", 1, 8192, BF16),
    ("8B", 256, 1024, BF16),
]
# Shape, new tokens, context:
EXTEND_CASES = [
    ("8B", 4096, 4096),
    ("8B", 8192, 8192),
    ("8B", 16384, 16384),
    ("1B", 8192, 8192),
    ("8B", 2048, 8192),
    ("8B", 512, 512),
]
TREE_CASES = [
    (prefix, rows)
    for prefix in (4096, 1024, 16384, 2048, 8192, 32768)
    for rows in (64, 8, 256, 16, 32, 128)
]
"""What targets name first: a part may be cut."""
QUICK_TREE = [(4096, rows) for rows in (64, 8, 256)]
OWN = 64
"""Tokens that each row of a tree has for itself behind the prefix."""
NEVER = 1 << 62


def measure_decode(setting: Setting, findings: Findings) -> None:
    """Measure one new token per row. Bytes: keys and values once, queries, outputs."""
    smoke = [("smoke", 3, 40, BF16), ("smoke", 3, 40, INT4)]
    cases = setting.choose(DECODE_CASES, DECODE_CASES[1:2], smoke)
    for name, rows, context, kv_dtype in cases:
        cache = {INT8: "int8", INT4: "int4"}.get(kv_dtype, str(kv_dtype).removeprefix("torch."))
        with findings.attempt(shape=name, rows=rows, context=context, cache=cache) as case:
            shape = SHAPES[name]
            # Lengths differ, as in serving; their sum equals that of equal lengths.
            lengths = [(1, context - 8 * (i % 2) + 4) for i in range(rows)]
            paged = make_paged(lengths, shape, setting.device, kv_dtype=kv_dtype)
            makers: dict[str, Callable[[], Call]] = {OURS: partial(attend, setting.kernels, paged)}
            if kv_dtype == BF16:
                makers["sdpa"] = partial(sdpa, rows, 1, context, shape, setting.device)
            case["bytes"] = moved = paged.decode_bytes()
            case |= time_rates(setting, makers, moved, "bytes_per_second", "copy_bandwidth")


def measure_extend(setting: Setting, findings: Findings) -> None:
    """Measure chunks of one row behind a context. FLOPs: 4 D per query head and visible pair."""
    smoke = [("smoke", 24, 40), ("smoke", 24, 24)]
    cases = setting.choose(EXTEND_CASES, EXTEND_CASES[1:2], smoke)
    for name, new, context in cases:
        with findings.attempt(shape=name, new=new, context=context) as case:
            shape = SHAPES[name]
            paged = make_paged([(new, context)], shape, setting.device)
            makers = {
                OURS: partial(attend, setting.kernels, paged),
                "sdpa": partial(sdpa, 1, new, context, shape, setting.device),
            }
            case["flops"] = flops = 4 * shape.head_dim * shape.heads * visible_pairs(new, context)
            case |= time_rates(setting, makers, flops, "flops_per_second", "matmul_rate")


def measure_tree(setting: Setting, findings: Findings) -> None:
    """Measure one prefix with many rows, beside the same rows reading their whole context each.
    Both read the same memory: if the L2 cache holds the prefix, per-row decode reads it from there,
    as in serving."""
    shape = SHAPES["smoke" if setting.smoke else "8B"]
    kernels = setting.kernels
    cases = setting.choose(TREE_CASES, QUICK_TREE, [(2048, 3)])
    for prefix, rows in cases:
        with findings.attempt(prefix=prefix, rows=rows) as case:
            lengths = [(1, prefix + OWN - (i % 8)) for i in range(rows)]
            paged = make_paged(lengths, shape, setting.device, prefix=prefix)
            calls = {
                "tree": attend(kernels, paged),
                "per row": attend(kernels, paged, per_row_plan(kernels, paged)),
            }
            found = time_in_turns(setting, calls)
            tree, per_row = found["tree"].median, found["per row"].median
            moved = paged.decode_bytes()
            case |= {
                "own": OWN,
                "tree_us": tree * 1e6,
                "per_row_us": per_row * 1e6,
                "speed_up": per_row / tree,
                "bytes": moved,
                "share": setting.share(moved / tree, "copy_bandwidth"),
            }


def per_row_plan(kernels: KernelSet, paged: Paged) -> Any:
    """Return the plan of a cost rule that finds no sharing worthwhile."""
    if kernels.name == "reference":
        return bound_plan(kernels, paged.batch)
    from rootlace.kernels.triton.attention import AttentionRules, plan_attention
    from rootlace.kernels.triton.attention_plan import SharingRule

    batch = paged.batch
    rules = AttentionRules(sharing=SharingRule(node_bytes=NEVER))
    # Not planned as a graph's: that would launch the kernel for shared nodes in vain.
    plan = plan_attention(batch, None, rules=rules)
    return plan.bind([torch.from_numpy(array).to(batch.device) for array in plan.arrays])


def sdpa(rows: int, new: int, context: int, shape: HeadShape, device: torch.device) -> Call:
    """Call torch's own attention with dense keys and values, which is easier: one new token per
    row, or a causal chunk behind a context."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        out = torch.empty((rows, heads, tokens, shape.head_dim), dtype=BF16, device=device)
        return out.normal_(generator=generator)

    q = normal(shape.heads, new)
    k, v = normal(shape.kv_heads, context), normal(shape.kv_heads, context)
    if new in (1, context):
        causal = new > 1
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    # This mask has no grouped queries: keys are repeated beforehand, which costs memory, not time.
    groups = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = causal_lower_right(new, context)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def visible_pairs(new: int, context: int) -> int:
    """Return the query-key pairs of a causal chunk: the last `new` of `context` tokens."""
    return new * (context - new) + new * (new + 1) // 2
