"""Attention kernels beside the device's ceilings and beside others on the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.paged import FP8, LLAMA_1B, LLAMA_8B, SMOKE, HeadShape, attend, make_paged
from benchmarks.gpu.setting import Report, Setting, describe, has_faulted
from benchmarks.gpu.timing import Clock, synchronize

Make = Callable[[], Callable[[], object]]

OURS = "rootlace"
LONG = 4096
"""Contexts from here on count for the targets."""
MANY_ROWS = 16
"""Decode cases with fewer rows are too small to fill a GPU; they count for no target."""

SHAPES = {"8B": LLAMA_8B, "1B": LLAMA_1B, "smoke": SMOKE}

DECODE_CASES = [
    # (shape, rows, context, cache)
    ("8B", 64, 4096, torch.bfloat16),
    ("8B", 64, 8192, torch.bfloat16),
    ("8B", 16, 32768, torch.bfloat16),
    ("1B", 64, 8192, torch.bfloat16),
    ("8B", 64, 8192, FP8),
    ("8B", 1, 8192, torch.bfloat16),
    ("8B", 256, 1024, torch.bfloat16),
]
QUICK_DECODE = DECODE_CASES[1:2]
SMOKE_DECODE = [("smoke", 3, 40, torch.bfloat16)]

EXTEND_CASES = [
    # (shape, new tokens, context)
    ("8B", 4096, 4096),
    ("8B", 8192, 8192),
    ("8B", 16384, 16384),
    ("1B", 8192, 8192),
    ("8B", 2048, 8192),
    ("8B", 512, 512),
]
QUICK_EXTEND = EXTEND_CASES[1:2]
SMOKE_EXTEND = [("smoke", 24, 40), ("smoke", 24, 24)]


def measure_decode(setting: Setting, report: Report) -> None:
    """One new token per row. Bytes: keys and values once, queries, outputs."""
    cases = SMOKE_DECODE if setting.smoke else QUICK_DECODE if setting.quick else DECODE_CASES
    clock = Clock(setting.device)
    for name, rows, context, kv_dtype in report.progress(cases, "decode attention"):
        what = {"shape": name, "rows": rows, "context": context, "cache": dtype_name(kv_dtype)}
        with report.attempt(**what):
            found = _decode_case(setting, clock, SHAPES[name], rows, context, kv_dtype)
            report.add({**what, **found})


def _decode_case(
    setting: Setting,
    clock: Clock,
    shape: HeadShape,
    rows: int,
    context: int,
    kv_dtype: torch.dtype,
) -> dict[str, Any]:
    device = setting.device
    # Lengths differ, as in serving; their sum is that of equal ones.
    lengths = [context - 8 * (i % 2) + 4 for i in range(rows)]
    paged = make_paged([(1, n) for n in lengths], shape, device, kv_dtype=kv_dtype)
    makers: dict[str, Make] = {OURS: lambda: attend(setting.kernels, paged)}
    if kv_dtype == torch.bfloat16:
        makers["sdpa"] = lambda: sdpa(rows, 1, context, shape, device)
    moved = paged.decode_bytes(shape)
    found = compare(setting, clock, makers, setting.repeats(50))
    for entry in found.values():
        if "us" in entry:
            rate = moved / (entry["us"] * 1e-6)
            entry["bytes_per_second"] = rate
            entry["share"] = setting.share(rate, "copy_bandwidth")
    return {"bytes": moved, "kernels": found}


def measure_extend(setting: Setting, report: Report) -> None:
    """Chunks of one row behind a context. FLOPs: 4 D per query head and visible pair."""
    cases = SMOKE_EXTEND if setting.smoke else QUICK_EXTEND if setting.quick else EXTEND_CASES
    clock = Clock(setting.device)
    for name, new, context in report.progress(cases, "extend attention"):
        what = {"shape": name, "new": new, "context": context}
        with report.attempt(**what):
            report.add({**what, **_extend_case(setting, clock, SHAPES[name], new, context)})


def _extend_case(
    setting: Setting, clock: Clock, shape: HeadShape, new: int, context: int
) -> dict[str, Any]:
    device = setting.device
    paged = make_paged([(new, context)], shape, device)
    makers: dict[str, Make] = {
        OURS: lambda: attend(setting.kernels, paged),
        "sdpa": lambda: sdpa(1, new, context, shape, device),
    }
    flops = 4 * shape.head_dim * shape.heads * visible_pairs(new, context)
    found = compare(setting, clock, makers, setting.repeats(30))
    for entry in found.values():
        if "us" in entry:
            rate = flops / (entry["us"] * 1e-6)
            entry["flops_per_second"] = rate
            entry["share"] = setting.share(rate, "matmul_rate")
    return {"flops": flops, "kernels": found}


def sdpa(
    rows: int, new: int, context: int, shape: HeadShape, device: torch.device
) -> Callable[[], object]:
    """torch's own attention on the same work, with dense keys and values, which is easier: one new
    token per row, or a causal chunk behind what it continues."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        out = torch.empty(
            (rows, heads, tokens, shape.head_dim), dtype=torch.bfloat16, device=device
        )
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
    """Query-key pairs of a causal chunk: the last `new` of `context` tokens."""
    return new * (context - new) + new * (new + 1) // 2


def compare(
    setting: Setting, clock: Clock, makers: Mapping[str, Make], repeats: int
) -> dict[str, dict[str, Any]]:
    """Times of those that can be made and run here; the others with their error."""
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in makers.items():
        try:
            call = make()
            call()
            synchronize(setting.device)
            calls[name] = call
        except Exception as error:
            if has_faulted():
                raise
            found[name] = {"error": describe(error)}
    for name, timing in clock.compare(calls, repeats, capture=setting.on_gpu).items():
        found[name] = dict(timing.as_json())
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
