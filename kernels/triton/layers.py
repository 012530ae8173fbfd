"""Norms, gathers, copies, gated activations, and products with quantised weights.

Gathers, copies and activations read and write each element once. Each kernel gives the bits of its
reference, in `reference/layers.py` and `reference/kv_cache.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.reference.layers import linear as dense_products
from rootlace.kernels.reference.layers import table_of
from rootlace.kernels.triton.launching import (
    TYPE_NAMES,
    architecture,
    as_bits,
    dot,
    from_e4m3,
    native_e4m3,
    padded,
    round_to,
    settings,
)
from rootlace.kernels.weights import CODES, Quantised, Weight, parts_of

# Feed tokens --------------------------------------------------------------------------------------
#
# Tokens of the step before, written to their places: `reference/layers.py`.
#
# In a decode step every token may come from the step before. A launch takes longer than its few
# hundred numbers, and torch operations would take six launches.


FEED_BLOCK = 256


@triton.jit
def feed_tokens_kernel(ids_ptr, feeds_ptr, found_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    feed = tl.load(feeds_ptr + index, mask=inside, other=-1)
    ids = tl.load(ids_ptr + index, mask=inside, other=0)
    found = tl.load(found_ptr + feed, mask=feed >= 0, other=0).to(tl.int64)
    tl.store(out_ptr + index, tl.where(feed >= 0, tl.maximum(found, 0), ids), mask=inside)


def feed_tokens(token_ids: torch.Tensor, feeds: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Put tokens of the step before into their places: see `interface.KernelSet`.

    token_ids, feeds int64 [T], found int32 [S], each contiguous -> int64 [T]. Feeds must be below
    S: the device checks none.
    """
    out = torch.empty_like(token_ids)
    count = len(token_ids)
    if count:
        feed_tokens_kernel[(triton.cdiv(count, FEED_BLOCK),)](
            token_ids, feeds, found, out, count, BLOCK=FEED_BLOCK, num_warps=4
        )
    return out


# Embedding ----------------------------------------------------------------------------------------
#
# Token embedding, a gather of rows without a change of bits: `reference/layers.py`.


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(weight_ptr, ids_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(ids_ptr + row).to(tl.int64)
    values = tl.load(weight_ptr + token * stride + column, mask=inside)
    tl.store(out_ptr + row * width + column, values, mask=inside)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gather the rows `ids` [T] (int64 or int32) of `weight` [V, H] -> [T, H], the weight's dtype.
    Ids must be in 0..V-1: the device checks none."""
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
    """Copy part c of the `width` elements of slot `source[i]` in layer l, in program (i, l, c)."""
    index = tl.program_id(0)
    layer = cache_ptr + tl.program_id(1).to(tl.int64) * layer_stride
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = layer + tl.load(source_ptr + index).to(tl.int64) * width
    target = layer + tl.load(target_ptr + index).to(tl.int64) * width
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


def copy_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Set cache[target[i]] = cache[source[i]] in every layer at once, in place.

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
    """Return gate / 2 * (1 + tanh(z)) = gate / (1 + exp(-2 z)), with z = sqrt(2 / pi) (gate +
    0.044715 gate^3). Where the exponential overflows, the quotient is the limit, zero."""
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
    """Return silu(gate) * up of gate_up [T, 2I] = [gate, up] -> [T, I]."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up of gate_up [T, 2I] = [gate, up] -> [T, I], by Gemma's approximation
    with tanh."""
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
# A program holds one row in registers. It reads x and residual once and writes the sum and the norm
# once, 4 * H elements for `add_rms_norm`. Numbers are rounded where the reference rounds: the sum,
# the quotient, the product. The mean is summed in another order, in float32 as in the reference.

WIDEST_NORM = 32768
"""Maximum number of columns that a program can hold in registers."""


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
    """Compute weight * (x / sqrt(mean(x^2) + eps)) of a row of x, or of its sum with the residual's
    row."""
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
    """Return (rms_norm(s), s) with `s = residual + x`. Both inputs [T, H]; neither is changed."""
    return _normed(_rows(x), _rows(residual), weight, eps)


def _normed(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm, the input of the norm)."""
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
    """Return x [..., H] as [rows, H] with adjacent columns, copied only if no such view exists."""
    if x.shape[-1] > WIDEST_NORM:
        raise ValueError(f"rows of {x.shape[-1]} columns; at most {WIDEST_NORM} are supported")
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


# Linear -------------------------------------------------------------------------------------------
#
# Products with quantised weights: `reference/layers.py`, without a dense matrix in memory.
#
# A program computes BLOCK_M rows of BLOCK_N outputs. The program unpacks codes in registers,
# BLOCK_K inputs at a time, and applies the groups' scales as in `weights.Quantised`. The weights
# are rounded to the activations' dtype and multiplied by the matrix units. So every BLOCK_M rows
# read the codes once, which suits steps of few rows: reading bounds these steps. Steps of more rows
# make each matrix dense once, as the reference does.


MOST_ROWS = 64
"""Rows of a step beyond which matrices are made dense. The best value has not been measured."""


@triton.jit
def _numbers(pointer, units, output, group, inside, GROUPS: tl.constexpr, UNITS: tl.constexpr):
    """Load scales or offsets of outputs [N, 1] and groups [1, K], float32; 0 where not `inside`."""
    found = tl.load(pointer + output * GROUPS + group, mask=inside, other=0).to(tl.float32)
    if units is not None:
        unit = tl.load(units + output * UNITS + group // (GROUPS // UNITS), mask=inside, other=0)
        found *= unit.to(tl.float32)
    return found


@triton.jit(do_not_specialize=["rows"])
def quantised_linear_kernel(
    x,  # [T, INPUTS]
    values,  # [OUTPUTS, INPUTS], or [OUTPUTS, INPUTS / 2] where two codes share a byte
    table,  # [16] float32, values of codes of four bits, or nothing
    scales,  # [OUTPUTS, GROUPS]
    offsets,  # the same, or nothing
    units,  # [OUTPUTS, UNITS] of scales, or nothing
    offset_units,  # [OUTPUTS, OFFSET_UNITS] of offsets, or nothing
    order,  # [INPUTS] int32, or nothing
    bias,  # [OUTPUTS], or nothing
    out,  # [T, OUTPUTS]
    rows,
    x_stride,
    out_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    OFFSET_UNITS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute outputs from i * BLOCK_N on, of rows from j * BLOCK_M on, in program (i, j)."""
    output = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column = k
        if order is not None:
            column = tl.load(order + k, mask=k < INPUTS, other=0)
        a = tl.load(
            x + row[:, None] * x_stride + column[None, :],
            mask=(row < rows)[:, None] & (k < INPUTS)[None, :],
            other=0,
        )
        inside = (output < OUTPUTS)[:, None] & (k < INPUTS)[None, :]
        if table is not None:
            place = values + output[:, None] * (INPUTS // 2) + (k // 2)[None, :]
            code = tl.load(place, mask=inside, other=0).to(tl.int32)
            number = tl.load(table + ((code >> (k % 2 * 4)[None, :]) & 15))
        else:
            code = tl.load(values + output[:, None] * INPUTS + k[None, :], mask=inside, other=0)
            number = from_e4m3(code, tl.float32, NATIVE) if FP8 else code.to(tl.float32)
        group = (k // (INPUTS // GROUPS))[None, :]
        weight = number * _numbers(scales, units, output[:, None], group, inside, GROUPS, UNITS)
        if offsets is not None:
            weight += _numbers(
                offsets, offset_units, output[:, None], group, inside, GROUPS, OFFSET_UNITS
            )
        acc = dot(a, tl.trans(round_to(weight, a.dtype)), acc)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_stride + output[None, :],
        round_to(acc, out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )


def linear(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [T, inputs] by a weight -> [T, outputs] in x's dtype. See `interface.Linear`."""
    parts = parts_of(weight)
    if len(x) > MOST_ROWS or not any(isinstance(part, Quantised) for part in parts):
        return dense_products(x, weight, out)
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = x.new_empty((len(x), weight.shape[0]))
    begin = 0
    for part in parts:
        columns = out[:, begin : begin + part.shape[0]]
        begin += part.shape[0]
        if isinstance(part, Quantised):
            _multiply(x, part, columns)
        else:
            columns.copy_(dense_products(x, part))
    return out


def _multiply(x: torch.Tensor, weight: Quantised, out: torch.Tensor) -> None:
    """Compute out [T, outputs] = x W^T + bias. Rows of x and out may lie any distance apart."""
    outputs, inputs = weight.shape
    if not len(x):
        return
    arch = architecture(x.device)
    dtype, units = TYPE_NAMES[x.dtype], weight.units is not None
    launch = settings("quantised_linear", arch, dtype=dtype, units=units)
    rows, columns = min(padded(len(x), 16), MOST_ROWS), launch.blocks["BLOCK_N"]
    codes = weight.scheme.codes
    fp8 = weight.kind == "fp8_e4m3"
    quantised_linear_kernel[(triton.cdiv(outputs, columns), triton.cdiv(len(x), rows))](
        x,
        weight.values.view(torch.uint8) if fp8 else weight.values,
        None if CODES[codes].table is None else table_of(codes, x.device),
        weight.scales,
        weight.offsets,
        weight.units,
        weight.offset_units,
        weight.order,
        weight.bias,
        out,
        len(x),
        x.stride(0),
        out.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUPS=weight.scales.shape[1],
        UNITS=_count(weight.units),
        OFFSET_UNITS=_count(weight.offset_units),
        FP8=fp8,
        NATIVE=native_e4m3(arch),
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=launch.blocks["BLOCK_K"],
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        # Product and sum of a weight are rounded separately.
        enable_fp_fusion=False,
    )


def _count(units: torch.Tensor | None) -> int:
    return 1 if units is None else units.shape[1]
