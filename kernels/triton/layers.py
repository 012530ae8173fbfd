"""Norms, gathers, copies and gated activations.

Gathers, copies and activations read and write each element once.

Each kernel has the bits of its reference, in `reference/layers.py` and `reference/kv_cache.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.launching import (
    architecture,
    as_bits,
    padded,
    round_to,
    settings,
)

# Feed tokens --------------------------------------------------------------------------------------
#
# Tokens that the step before found, put in their places: `reference/layers.py`.
#
# In a decode step every token may be one of them. A launch takes longer than the few hundred
# numbers; as torch operations there would be six.


FEED_BLOCK = 256


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
        feed_tokens_kernel[(triton.cdiv(count, FEED_BLOCK),)](
            token_ids, feeds, found, out, count, BLOCK=FEED_BLOCK, num_warps=4
        )
    return out


# Embedding ----------------------------------------------------------------------------------------
#
# Token embedding, a gather of rows: `reference/layers.py`. Bit for bit what it copies.


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(weight_ptr, ids_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(ids_ptr + row).to(tl.int64)
    values = tl.load(weight_ptr + token * stride + column, mask=inside)
    tl.store(out_ptr + row * width + column, values, mask=inside)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `weight` [V, H] named by `ids` [T] (int64 or int32) -> [T, H], the weight's dtype.

    Ids must be in 0..V-1: nothing checks them on the device.
    """
    if weight.stride(1) != 1:
        raise ValueError("the columns of the embedding's weight must be adjacent")
    tokens, width = len(ids), weight.shape[1]
    out = torch.empty((tokens, width), device=weight.device, dtype=weight.dtype)
    if out.numel():
        launch = settings("embedding", architecture(weight.device))
        block = launch.blocks["BLOCK"]
        embedding_kernel[(tokens, triton.cdiv(width, block))](
            weight,
            ids.contiguous(),
            out,
            width,
            weight.stride(0),
            BLOCK=block,
            num_warps=launch.num_warps,
        )
    return out


# Copy slots ---------------------------------------------------------------------------------------
#
# Copying rows of the KV cache, all layers in one launch: `reference/kv_cache.py`, `copy_slots`.
#
# For copy-on-write of partial blocks. Copies are exact to the bit; fp8 caches are copied as bytes.


@triton.jit(do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def copy_slots_kernel(cache_ptr, source_ptr, target_ptr, width, layer_stride, BLOCK: tl.constexpr):
    """Program (i, l, c) copies part c of slot `source[i]`'s `width` elements in layer l."""
    index = tl.program_id(0)
    layer = cache_ptr + tl.program_id(1).to(tl.int64) * layer_stride
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = layer + tl.load(source_ptr + index).to(tl.int64) * width
    target = layer + tl.load(target_ptr + index).to(tl.int64) * width
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


def copy_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """cache[target[i]] = cache[source[i]] in every layer at once, in place.

    cache [L, B, S, N, D] (layers, keys and values, are one axis L), each layer contiguous; source,
    target int64 [M] slots. No target may also be a source, or appear twice.
    """
    if not cache[0].is_contiguous():
        raise ValueError("the layers of the KV cache must be contiguous")
    if not len(source):
        return
    bits = as_bits(cache)
    width = bits.shape[3] * bits.shape[4]
    launch = settings("copy_slots", architecture(cache.device))
    block = launch.blocks["BYTES"] // bits.itemsize
    copy_slots_kernel[(len(source), len(bits), triton.cdiv(width, block))](
        bits,
        source.contiguous(),
        target.contiguous(),
        width,
        bits.stride(0),
        BLOCK=block,
        num_warps=launch.num_warps,
    )


# Gated --------------------------------------------------------------------------------------------
#
# Gated activations of the MLP in one pass, 3 * I elements per token. Computed in float32 and
# rounded where the reference rounds: the activation, then the product.


@triton.jit
def silu(gate):
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def gelu_tanh(gate):
    """gate / 2 * (1 + tanh(z)) = gate / (1 + exp(-2 z)), z = sqrt(2 / pi) (gate + 0.044715 gate^3).

    Where the exponential overflows, the quotient is the limit, zero.
    """
    double_z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-double_z))


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, width, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up_ptr + row * stride + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = round_to(gelu_tanh(wide) if GELU else silu(wide), gate.dtype)
    product = round_to(activated.to(tl.float32) * up.to(tl.float32), gate.dtype)
    tl.store(out_ptr + row * width + column, product, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]. The approximation by tanh, as Gemma has it."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), device=gate_up.device, dtype=gate_up.dtype)
    if out.numel():
        launch = settings("gated", architecture(gate_up.device))
        block = launch.blocks["BLOCK"]
        gated_kernel[(tokens, triton.cdiv(width, block))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            GELU=gelu,
            BLOCK=block,
            num_warps=launch.num_warps,
        )
    return out


# Root mean square layer norm, alone and with the residual's addition: `reference/layers.py`.
#
# One program per row, which it holds in registers: x and residual are read once, the sum and the
# norm are written once, 4 * H elements for `add_rms_norm`. Rounded where the reference rounds: the
# sum, the quotient, the product. The mean is summed in another order, in float32 as there.

WIDEST_NORM = 32768
"""Columns that a program can hold in registers."""


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,  # or nothing
    weight_ptr,
    out_ptr,
    total_ptr,  # with a residual
    width,
    x_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
):
    """weight * (x / sqrt(mean(x^2) + eps)) of a row of x, or of its sum with the residual's."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = round_to(residual.to(tl.float32) + x.to(tl.float32), x.dtype)
        tl.store(total_ptr + row * width + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    quotient = round_to(wide * scale, x.dtype).to(tl.float32)
    normed = round_to(quotient * weight.to(tl.float32), x.dtype)
    tl.store(out_ptr + row * width + column, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis. x [..., H], weight [H], same dtype -> [..., H]."""
    out, _ = _normed(_rows(x), None, weight, eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`s = residual + x`; returns (rms_norm(s), s). Both inputs [T, H]; neither is changed."""
    return _normed(_rows(x), _rows(residual), weight, eps)


def _normed(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(The norm, what is normed)."""
    width = x.shape[1]
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(out)
    if out.numel():
        launch = settings("rms_norm", architecture(x.device), width=padded(width))
        rms_norm_kernel[(len(x),)](
            x,
            residual,
            weight.contiguous(),
            out,
            None if residual is None else total,
            width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            BLOCK=padded(width),
            num_warps=launch.num_warps,
        )
    return out, total


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., H] as [rows, H] with adjacent columns; a copy only of what has no such view."""
    if x.shape[-1] > WIDEST_NORM:
        raise ValueError(f"rows of {x.shape[-1]} columns; at most {WIDEST_NORM} are supported")
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
