"""Queries and keys normed and rotated, keys and values cached: `reference/layers.py`.

One pass over qkv: every element is read once and written once (2 * (Nq + 2 Nk) * D elements per
token, and the keys and values of a duplicate again). A program takes one write and a group of
heads, in two tiles [heads, D / 2], the halves that are rotated into each other.

Rounded where the reference rounds: the normed quotient, its product with the weight, each product
and the sum of the rotation (in float32 the compiler may fuse the last two). fp8 is made of the
rounded keys and values divided by their head's scale in float32, integers as in
`reference/kv_cache.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import KVCodes, KVScaling
from rootlace.kernels.triton.kv_storage import (
    bits_of,
    check_cache,
    mixed,
    scale_arguments,
    store_codes,
)
from rootlace.kernels.triton.launching import Launch, Variant, settings
from rootlace.kernels.triton.numerics import (
    TYPE_NAMES,
    architecture,
    as_bits,
    padded,
    round_to,
    to_e4m3,
)


@triton.jit
def _product(x, factor, kind: tl.constexpr):
    return round_to(x * factor, kind).to(tl.float32)


@triton.jit
def _norm(first, second, weight_ptr, column, eps, HALF: tl.constexpr):
    """Both halves of heads [HEADS, BLOCK] normed over 2 * HALF columns, in their dtype."""
    inside = column < HALF
    weight_1 = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_1 * wide_1 + wide_2 * wide_2, 1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    kind: tl.constexpr = first.dtype
    normed_1 = _product(wide_1, scale, kind) * weight_1
    normed_2 = _product(wide_2, scale, kind) * weight_2
    return round_to(normed_1, kind), round_to(normed_2, kind)


@triton.jit
def _rotate(first, second, cos, sin):
    """[x1 c - x2 s, x2 c + x1 s], every operation rounded to the dtype."""
    kind: tl.constexpr = first.dtype
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    left = _product(wide_1, cos, kind) - _product(wide_2, sin, kind)
    right = _product(wide_2, cos, kind) + _product(wide_1, sin, kind)
    return round_to(left, kind), round_to(right, kind)


@triton.jit
def _store_scaled(target, values, scale_ptr, head, inside, num_heads):
    """Values [HEADS, BLOCK] to the cache, as they are or as fp8 in units of their head's scale."""
    if scale_ptr is None:
        tl.store(target, values, mask=inside)
    else:
        scale = tl.load(scale_ptr + head, mask=head < num_heads, other=1.0)
        stored = tl.div_rn(values.to(tl.float32), tl.broadcast_to(scale, values.shape))
        tl.store(target, to_e4m3(stored), mask=inside)


@triton.jit
def _store(
    cache_ptr, scale_ptr, slot, head, column, first, second, inside,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Both halves [HEADS, BLOCK] of a token's keys, or values, to its slot."""
    if BITS:
        store_codes(
            cache_ptr, scale_ptr, slot, head, column, first, second, inside, KV_HEADS, HALF, BITS
        )
    else:
        place = cache_ptr + (slot * KV_HEADS + head) * (2 * HALF) + column
        _store_scaled(place, first, scale_ptr, head, inside, KV_HEADS)
        _store_scaled(place + HALF, second, scale_ptr, head, inside, KV_HEADS)


# Sizes and pointers that vary from step to step must not cause another compilation.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "tokens_ptr"],
)
def rope_and_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    tokens_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    qkv_token_stride,
    qkv_head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, g): write i and, for g below cdiv(Q_HEADS, HEADS), a group of query heads, for
    the others of key and value heads. HALF = D / 2 columns are padded to BLOCK."""
    write = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    token = write
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + write).to(tl.int64)

    # Every head loads cosines for itself (from the L1 cache): in vectors, with nothing exchanged.
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    across = column < HALF
    cos = tl.load(cos_ptr + token * HALF + column, mask=across, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + column, mask=across, other=0.0)
    qkv = qkv_ptr + token * qkv_token_stride

    if group < q_groups:
        if write < num_tokens:
            head = group * HEADS + tl.arange(0, HEADS)[:, None]
            inside = (head < Q_HEADS) & across
            source = qkv + head * qkv_head_stride + column
            first = tl.load(source, mask=inside, other=0.0)
            second = tl.load(source + HALF, mask=inside, other=0.0)
            if q_norm_ptr is not None:
                first, second = _norm(first, second, q_norm_ptr, column, eps, HALF)
            first, second = _rotate(first, second, cos, sin)
            if BITS == 4:
                first, second = mixed(first, second, column, HALF)
            target = q_out_ptr + (token * Q_HEADS + head) * (2 * HALF) + column
            tl.store(target, first, mask=inside)
            tl.store(target + HALF, second, mask=inside)
    else:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        slot = tl.load(slots_ptr + write).to(tl.int64)
        inside = (head < KV_HEADS) & across

        source = qkv + (Q_HEADS + head) * qkv_head_stride + column
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + HALF, mask=inside, other=0.0)
        if k_norm_ptr is not None:
            first, second = _norm(first, second, k_norm_ptr, column, eps, HALF)
        first, second = _rotate(first, second, cos, sin)
        if BITS == 4:
            first, second = mixed(first, second, column, HALF)
        _store(
            k_cache_ptr, k_scale_ptr, slot, head, column, first, second, inside,
            KV_HEADS, HALF, BITS,
        )  # fmt: skip

        source += KV_HEADS * qkv_head_stride
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + HALF, mask=inside, other=0.0)
        _store(
            v_cache_ptr, v_scale_ptr, slot, head, column, first, second, inside,
            KV_HEADS, HALF, BITS,
        )  # fmt: skip


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: KVScaling | None = None,
) -> torch.Tensor:
    """See `interface.RopeAndWrite`. A view of qkv with adjacent columns is read as it lies.

    Raises ValueError for caches of another shape or layout than the interface's.
    """
    count, _, head_dim = qkv.shape
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    q_heads = qkv.shape[1] - 2 * kv_heads
    check_cache("keys", k_cache, qkv, scales)
    check_cache("values", v_cache, qkv, scales)
    k_scales, v_scales = scale_arguments(k_cache, v_cache, scales)
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    q = torch.empty((count, q_heads, head_dim), device=qkv.device, dtype=qkv.dtype)
    if not count:
        return q
    launch = _launch(head_dim, architecture(qkv.device))
    heads = launch.blocks["HEADS"]
    groups = triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads)
    rope_and_write_kernel[(len(slots), groups)](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        q,
        as_bits(k_cache),
        as_bits(v_cache),
        slots,
        tokens,
        q_norm,
        k_norm,
        k_scales,
        v_scales,
        count,
        qkv.stride(0),
        qkv.stride(1),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BITS=bits_of(scales),
        HEADS=heads,
        BLOCK=padded(head_dim // 2),
        num_warps=launch.num_warps,
    )
    return q


def _launch(head_dim: int, arch: int) -> Launch:
    return settings("rope_and_write", arch, head_dim=padded(head_dim))


def variants(arch: int) -> list[Variant]:
    """Heads of 64, 80, 128 and 256; with and without norms, duplicates, fp8 and integers."""
    return [
        _variant(arch, "Llama-1B", torch.bfloat16, (32, 8, 64)),
        _variant(arch, "Llama-8B", torch.bfloat16, (32, 8, 128)),
        _variant(arch, "Llama-8B, duplicates", torch.bfloat16, (32, 8, 128), tokens=True),
        _variant(arch, "Llama-8B, fp8", torch.bfloat16, (32, 8, 128), fp8=True),
        _variant(arch, "Llama-8B, int8", torch.bfloat16, (32, 8, 128), bits=8),
        _variant(arch, "Llama-8B, int4", torch.bfloat16, (32, 8, 128), bits=4),
        _variant(arch, "Qwen3-8B", torch.bfloat16, (32, 8, 128), norm=True),
        _variant(
            arch, "norm, fp8, duplicates", torch.bfloat16, (16, 8, 256), True, True, tokens=True
        ),
        _variant(arch, "heads of 80", torch.float16, (32, 32, 80)),
        _variant(arch, "float32", torch.float32, (32, 8, 128), norm=True),
    ]


def _variant(
    arch: int,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    norm: bool = False,
    fp8: bool = False,
    tokens: bool = False,
    bits: int = 0,
) -> Variant:
    q_heads, kv_heads, head_dim = shape
    launch = _launch(head_dim, arch)
    plain = f"*{TYPE_NAMES[dtype]}"
    cache = "*u8" if fp8 or bits else plain
    scale = "*fp32" if fp8 else "*i32" if bits else "constexpr"
    arrays = {
        "qkv_ptr": plain,
        "cos_ptr": plain,
        "sin_ptr": plain,
        "q_out_ptr": plain,
        "k_cache_ptr": cache,
        "v_cache_ptr": cache,
        "slots_ptr": "*i64",
        "tokens_ptr": "*i64" if tokens else "constexpr",
        "q_norm_ptr": plain if norm else "constexpr",
        "k_norm_ptr": plain if norm else "constexpr",
        "k_scale_ptr": scale,
        "v_scale_ptr": scale,
    }
    strides = ("qkv_token_stride", "qkv_head_stride")
    constants: dict[str, Any] = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "BITS": bits,
        "HEADS": launch.blocks["HEADS"],
        "BLOCK": padded(head_dim // 2),
    }
    absent = [argument for argument, kind in arrays.items() if kind == "constexpr"]
    aligned = [name for name in arrays if name not in (*absent, "slots_ptr", "tokens_ptr")]
    return Variant(
        name,
        rope_and_write_kernel,
        {**arrays, "eps": "fp32"},
        {**constants, **dict.fromkeys(absent)},
        (*aligned, *(strides if head_dim % 16 == 0 else ())),
        num_warps=launch.num_warps,
    )
