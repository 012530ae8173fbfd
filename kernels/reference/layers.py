"""Products with weights.

dense:     y = x W^T + bias
quantised: W[o, i] = code * scale + offset of its group, then as above in x's type
"""

from __future__ import annotations

import functools

import torch

from rootlace.kernels.interface import KVCodes, KVScaling
from rootlace.kernels.reference.kv_cache import quantise as quantise_kv
from rootlace.kernels.reference.kv_cache import write_kv
from rootlace.kernels.weights import (
    CODES,
    Codes,
    Dense,
    Quantised,
    Scheme,
    Stacked,
    Weight,
    parts_of,
)

# Activation ---------------------------------------------------------------------------------------
#
# Activations of an MLP without a gate.
#
# relu: max(x, 0)
# gelu: x / 2 * (1 + erf(x / sqrt(2)))
# gelu_tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))


def relu(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I]."""
    return torch.nn.functional.relu(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I], exactly."""
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I]. The approximation by tanh."""
    return torch.nn.functional.gelu(x, approximate="tanh")


# Embedding ----------------------------------------------------------------------------------------
#
# Token embedding: y[t] = W[ids[t]].


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `weight` [V, H] named by `ids` [T] (int64) -> [T, H], the weight's dtype."""
    return weight.index_select(0, ids)


# Gated --------------------------------------------------------------------------------------------
#
# Gated activations of the MLP (SwiGLU and GeGLU, Shazeer 2020, arXiv:2002.05202).
#
# silu_mul: y = silu(g) * u,   silu(g) = g / (1 + exp(-g))
# clamped_mul: y = a * sigmoid(alpha * a) * (b + 1),   a = min(g, limit), b = u in -limit ... limit
# gelu_mul: y = gelu(g) * u,   gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def clamped_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]. As gpt-oss has it."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1.0))


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]. The approximation by tanh, as Gemma has it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


# Layer norm ---------------------------------------------------------------------------------------
#
# Layer norm (Ba et al. 2016, arXiv:1607.06450).
#
#     y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b
#
# All of it is in float32 and rounded once, as torch does it.


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Normalise the last axis. x [..., H], weight and bias [H], same dtype -> [..., H]."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


# Rms norm -----------------------------------------------------------------------------------------
#
# Root mean square layer norm (Zhang & Sennrich 2019, arXiv:1910.07467).
#
#     y = w * (x / sqrt(mean(x^2) + eps))
#
# The statistics and the division are in float32; the quotient is rounded to x's dtype before it is
# multiplied by w, as in the models' training code (the order matters in bfloat16).


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis. x [..., H], weight [H], same dtype -> [..., H]."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`s = residual + x`; returns (rms_norm(s), s). Both inputs [T, H]; neither is changed."""
    total = residual + x
    return rms_norm(total, weight, eps), total


# Rope ---------------------------------------------------------------------------------------------
#
# Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout.
#
# With x = [x1, x2] the two halves of a head and c, s the cosine and sine of position * frequency:
#
#     y = [x1 * c - x2 * s,  x2 * c + x1 * s]
#
# Queries and keys may be RMS-normalised per head before (Qwen3's qk-norm).


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, N, D] by cos and sin [T, D/2], all of one dtype -> [T, N, D]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position q [T, Nq, D] and k [T, Nk, D]; norm weights [D] are applied first where given."""
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin)


# Rope and write -----------------------------------------------------------------------------------
#
# Queries normed and rotated, keys too and into the cache with values; see `rope`, `kv_cache`.


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
    """See `interface.RopeAndWrite`."""
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q, k = rope(q, k, cos, sin, q_norm, k_norm, eps)
    if isinstance(scales, KVCodes):
        k, v = (quantise_kv(part, scales.bits).unsqueeze(1) for part in (k, v))
    elif scales is not None:
        k, v = _stored(k, scales.k, k_cache.dtype), _stored(v, scales.v, v_cache.dtype)
    write_kv(k_cache, v_cache, k, v, slots, tokens)
    return q


def _stored(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return (values.float() / scale.unsqueeze(1)).clamp(-most, most).to(dtype)


# Feed tokens --------------------------------------------------------------------------------------
#
# A step's tokens, some of which the step before found: y[i] = found[f[i]] if f[i] >= 0 else x[i].
#
# What was not found (-1) becomes token 0: its row has failed, and any token will do.


def feed_tokens(token_ids: torch.Tensor, feeds: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """token_ids, feeds int64 [T], found int32 [S] -> int64 [T]."""
    fed = found.index_select(0, feeds.clamp(min=0)).clamp(min=0)
    return torch.where(feeds >= 0, fed.to(torch.int64), token_ids)


# Linear -------------------------------------------------------------------------------------------


WEIGHTS = frozenset({"dense", *CODES})
"""The kinds of weights that `linear` multiplies by."""

LARGEST = {"int8": 127, "int4": 7}
"""The integers that `quantise` makes are -largest ... largest."""
AT_ONCE = 1 << 20
"""So many weights are rounded at a time, which bounds the memory that this takes beside them."""


def linear(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `interface.Linear`. x [T, inputs] -> [T, outputs] in x's dtype."""
    if isinstance(weight, Stacked):
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1, out=out)
    matrix = weight.matrix if isinstance(weight, Dense) else dequantise(weight).to(x.dtype)
    if out is None:
        return torch.nn.functional.linear(x, matrix, weight.bias)
    if weight.bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(weight.bias, x, matrix.t(), out=out)


def quantise(
    matrix: torch.Tensor,
    scheme: Scheme,
    bias: torch.Tensor | None = None,
    scales: torch.dtype = torch.float32,
) -> Quantised:
    """Round W [outputs, inputs] to the nearest int8 or int4 without offsets; a group's largest
    magnitude becomes the largest integer, as far as a scale of that type allows. Raises ValueError
    where groups do not fit the inputs, or for another scheme."""
    if scheme.codes not in LARGEST or scheme.offsets:
        raise ValueError(f"weights are not rounded to {scheme}")
    outputs, inputs = matrix.shape
    group = scheme.group or inputs
    code = CODES[scheme.codes]
    if inputs % group or inputs % code.in_byte:
        raise ValueError(f"{inputs} inputs are not whole groups of {group} in {scheme.codes}")
    values = matrix.new_empty((outputs, inputs // code.in_byte), dtype=code.dtype)
    found = matrix.new_empty((outputs, inputs // group), dtype=scales)
    rows = max(1, AT_ONCE // inputs)
    for begin in range(0, outputs, rows):
        some = slice(begin, begin + rows)
        _round(matrix[some], LARGEST[scheme.codes], values[some], found[some])
    return Quantised(scheme, values, found, bias=bias)


def _round(rows: torch.Tensor, largest: int, values: torch.Tensor, scales: torch.Tensor) -> None:
    groups = rows.float().view(*scales.shape, -1)
    scales.copy_(groups.abs().amax(dim=2) / largest)
    steps = torch.where(scales > 0, scales.float(), 1.0).unsqueeze(2)
    rounded = (groups / steps).round_().clamp_(-largest, largest).to(torch.int8).flatten(1)
    if values.dtype == torch.int8:
        values.copy_(rounded)
        return
    halves = rounded.view(torch.uint8) & 15
    torch.bitwise_or(halves[:, ::2], halves[:, 1::2] << 4, out=values)


def dequantise(weight: Quantised) -> torch.Tensor:
    """W, float32 [outputs, inputs], its columns in the order of the inputs."""
    outputs, inputs = weight.shape
    scales, offsets = flat_scales(weight)
    found = numbers(weight).view(outputs, -1, weight.group) * scales.unsqueeze(2)
    if offsets is not None:
        found += offsets.unsqueeze(2)
    found = found.view(outputs, inputs)
    if weight.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, weight.order.long(), found)


def dense(weight: Weight, dtype: torch.dtype) -> Dense:
    """The numbers that a weight stands for."""
    parts = parts_of(weight)
    matrices = [part.matrix if isinstance(part, Dense) else dequantise(part) for part in parts]
    matrix = torch.cat([matrix.to(dtype) for matrix in matrices])
    if all(part.bias is None for part in parts):
        return Dense(matrix)
    biases = [
        torch.zeros(len(matrix)) if part.bias is None else part.bias.float()
        for part, matrix in zip(parts, matrices, strict=True)
    ]
    return Dense(matrix, torch.cat(biases))


def numbers(weight: Quantised) -> torch.Tensor:
    """What the codes stand for, float32 [outputs, inputs]."""
    if CODES[weight.scheme.codes].table is None:
        return weight.values.float()
    halves = torch.stack((weight.values & 15, weight.values >> 4), dim=2).flatten(1)
    return table_of(weight.scheme.codes, halves.device)[halves.int()]


@functools.cache
def table_of(codes: Codes, device: torch.device) -> torch.Tensor:
    """Made once for each device: CUDA graphs cannot capture that it is copied from the host."""
    with torch.inference_mode(False):  # so that it can be used in any mode
        return torch.tensor(CODES[codes].table, device=device)


def flat_scales(weight: Quantised) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets as float32, times their units."""
    scales = _times(weight.scales, weight.units)
    offsets = None if weight.offsets is None else _times(weight.offsets, weight.offset_units)
    return scales, offsets


def _times(scales: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
    if units is None:
        return scales.float()
    repeated = units.float().repeat_interleave(scales.shape[1] // units.shape[1], dim=1)
    return scales.float() * repeated
