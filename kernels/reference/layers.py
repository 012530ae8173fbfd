"""Products with weights.

dense:     y = x W^T + bias
quantised: W[o, i] = code * scale + offset of its group, then as above in x's type
"""

from __future__ import annotations

import functools

import torch

from rootlace.kernels.codes import Codes
from rootlace.kernels.interface import KVCodes, KVScaling
from rootlace.kernels.reference.kv_cache import mixed, write_kv
from rootlace.kernels.reference.kv_cache import quantise as quantise_kv
from rootlace.kernels.weights import CODES, Dense, Quantised, Scheme, Stacked, Weight, parts_of

# Activation ---------------------------------------------------------------------------------------
#
# Activations of an MLP without a gate.
#
# relu: max(x, 0)
# gelu: x / 2 * (1 + erf(x / sqrt(2)))
# gelu_tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))


relu = torch.nn.functional.relu
gelu = torch.nn.functional.gelu
gelu_tanh = functools.partial(gelu, approximate="tanh")


# Embedding ----------------------------------------------------------------------------------------
#
# Token embedding: y[t] = W[ids[t]].


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gather the rows `ids` [T] (int64) of `weight` [V, H] -> [T, H], the weight's dtype."""
    return weight.index_select(0, ids)


# Gated --------------------------------------------------------------------------------------------
#
# Gated activations of the MLP (SwiGLU and GeGLU, Shazeer 2020, arXiv:2002.05202).
#
# silu_mul: y = silu(g) * u,   silu(g) = g / (1 + exp(-g))
# clamped_mul: y = a * sigmoid(alpha * a) * (b + 1),   a = min(g, limit), b = u in -limit ... limit
# gelu_mul: y = gelu(g) * u,   gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of gate_up [T, 2I] = [gate, up] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def clamped_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Apply gpt-oss's clamped activation to gate_up [T, 2I] = [gate, up] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1.0))


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up of gate_up [T, 2I] -> [T, I], by Gemma's approximation with tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


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
    """Return (rms_norm(s), s) with `s = residual + x`. Both inputs [T, H]; neither is changed."""
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
# Norm and rotation of queries and keys, and writing of keys and values: see `rope`, `kv_cache`.


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
    """Compute `interface.RopeAndWrite`."""
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q, k = rope(q, k, cos, sin, q_norm, k_norm, eps)
    if isinstance(scales, KVCodes):
        q, k = mixed(q), mixed(k)
        k, v = (quantise_kv(part, scales.bits).unsqueeze(1) for part in (k, v))
    elif scales is not None:
        k, v = _stored(k, scales.k, k_cache.dtype), _stored(v, scales.v, v_cache.dtype)
    write_kv(k_cache, v_cache, k, v, slots, tokens)
    return q


def _stored(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (values.float() / scale.unsqueeze(1)).clamp(-limit, limit).to(dtype)


# Feed tokens --------------------------------------------------------------------------------------
#
# Tokens of a step, some from the step before: y[i] = found[f[i]] if f[i] >= 0 else x[i].
#
# A found token of -1 becomes token 0: its row has failed, and any token will do.


def feed_tokens(token_ids: torch.Tensor, feeds: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Replace tokens by found ones: token_ids, feeds int64 [T], found int32 [S] -> int64 [T]."""
    fed = found.index_select(0, feeds.clamp(min=0)).clamp(min=0)
    return torch.where(feeds >= 0, fed.to(torch.int64), token_ids)


# Linear -------------------------------------------------------------------------------------------


WEIGHTS = frozenset({"dense", *CODES})
"""Kinds of weights that `linear` multiplies by."""

INT8 = Scheme("int8", 32, offsets=True)
INT4 = Scheme("uint4", 32, offsets=True)
"""Schemes of -128 ... 127 and of 0 ... 15, with a scale and an offset of 16 bits per 32 inputs of
an output: 9 and 5 bits per weight."""
ROWS = Scheme("int8")
"""Scheme of -127 ... 127 with a float32 scale per output, 8 bits per weight: the fastest in native
kernels. The square of its error is about four times that of `INT8`."""
AT_ONCE = 1 << 18
"""Number of weights rounded at a time, which bounds the additional memory."""
CUTS = (0.0, 0.03, 0.06)
"""Fractions of a group's range to try to cut off, at either end, with 4 bits."""
STEPS = (255, 254, 253, 252, 250, 248, 244, 240)
"""Numbers of steps to try for a group's range, with 8 bits.

By chance, one of these numbers suits a group better: the mean square error is a fifth less than
with 255 alone. Multiples of 15, 31 and 63 among them match grids of as many steps.
"""
HALF_RANGE = (2.0**-10, 2.0**15)
"""Range of a matrix's largest magnitude for float16 scales and offsets. There float16 resolves
2^-14 of the magnitude. Other matrices have bfloat16."""


def linear(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [T, inputs] by a weight -> [T, outputs] in x's dtype. See `interface.Linear`."""
    if isinstance(weight, Stacked):
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1, out=out)
    matrix = weight.matrix if isinstance(weight, Dense) else dequantise(weight).to(x.dtype)
    if out is None:
        return torch.nn.functional.linear(x, matrix, weight.bias)
    if weight.bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(weight.bias, x, matrix.t(), out=out)


def quantise(matrix: torch.Tensor, scheme: Scheme, bias: torch.Tensor | None = None) -> Quantised:
    """Round W [outputs, inputs] to `INT8`, `INT4`, or to int8 of any groups without offsets.

    With offsets, a search finds the scale and offset of the least squared error (`_fitted`).
    Without, a group's largest magnitude becomes 127, and weights the nearest integer. Raises
    ValueError if groups do not fit the inputs, or for another scheme.
    """
    if scheme not in (INT8, INT4) and (scheme.codes != "int8" or scheme.offsets):
        raise ValueError(f"weights are not rounded to {scheme}")
    outputs, inputs = matrix.shape
    group = scheme.group or inputs
    if inputs % group:
        raise ValueError(f"{inputs} inputs are not whole groups of {group}")
    code = CODES[scheme.codes]
    values = matrix.new_empty((outputs, inputs // code.in_byte), dtype=code.dtype)
    kind, shape = torch.float32, (outputs, inputs // group)
    if scheme.offsets:
        largest = max(-float(matrix.min()), float(matrix.max())) if matrix.numel() else 0.0
        kind = torch.float16 if HALF_RANGE[0] < largest < HALF_RANGE[1] else torch.bfloat16
    scales = matrix.new_empty(shape, dtype=kind)
    offsets = matrix.new_empty(shape, dtype=kind) if scheme.offsets else None
    rows = max(1, AT_ONCE // inputs)
    for begin in range(0, outputs, rows):
        some = slice(begin, begin + rows)
        groups = matrix[some].float().unflatten(1, (-1, group))
        if offsets is None:
            scales[some] = groups.abs().amax(dim=2) / 127
            steps = torch.where(scales[some] > 0, scales[some], 1.0).unsqueeze(2)
            values[some] = (groups / steps).round_().clamp_(-127, 127).flatten(1)
            continue
        codes, scales[some], offsets[some] = _fitted(groups, scheme, kind)
        if scheme == INT8:
            values[some] = codes.flatten(1)
        else:
            halves = codes.to(torch.uint8).flatten(1)
            torch.bitwise_or(halves[:, ::2], halves[:, 1::2] << 4, out=values[some])
    return Quantised(scheme, values, scales, offsets, bias)


def _fitted(
    groups: torch.Tensor, scheme: Scheme, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Search codes with a small sum of (code * s + o - x)^2 for groups x [..., group].

    Returns codes (float32 [..., group]), scales s and offsets o of `kind` [...]. The search takes
    the best of several candidates, each rounded to `kind` before the comparison; of equals the
    first.
    """
    low, high = groups.aminmax(dim=-1, keepdim=True)
    least, most = (-128, 127) if scheme == INT8 else (0, 15)
    if scheme == INT8:
        spans = [(high - low) / steps for steps in STEPS]
        tried = [(scale, low - least * scale) for scale in spans]
    else:
        # A grid over the whole range meets numbers on a grid exactly.
        tried = [_cut(groups, low, high), ((high - low) / 15, low)]
    best: list[torch.Tensor] = []
    for scale, offset in tried:
        one, other = scale.to(kind), offset.to(kind)
        codes = _nearest(groups, one.float(), other.float(), least, most)
        error = (codes * one.float()).add_(other.float()).sub_(groups).square_()
        found = [error.sum(-1, keepdim=True), codes, one, other]
        if best:
            better = found[0] < best[0]
            found = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
        best = found
    _, codes, scale, offset = best
    return codes, scale.squeeze(-1), offset.squeeze(-1)


def _nearest(
    groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, least: int, most: int
) -> torch.Tensor:
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (groups - offset).mul_(inverse).round_().clamp_(least, most)


def _cut(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets [..., 1] for codes of 0 ... 15.

    Each of `CUTS` cuts off a part of the range; codes are the nearest integers. For given codes c
    the best scale is cov(c, x) / var(c), with an error of var(x) - cov(c, x)^2 / var(c). The cuts
    of the least error are taken, and fitted once more.
    """
    mean = groups.mean(dim=-1, keepdim=True)
    centred, span = groups - mean, high - low

    def fit(scale: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = _nearest(groups, scale, offset, 0, 15)
        middle = codes.mean(dim=-1, keepdim=True)
        both = torch.linalg.vecdot(codes, centred).unsqueeze(-1)
        square = torch.linalg.vecdot(codes, codes).unsqueeze(-1) - codes.shape[-1] * middle**2
        scale = torch.where(square > 0, both / square, 0.0)
        return scale, mean - scale * middle, scale * both  # reduction of the error

    best = [span / 15, low, torch.full_like(low, -1.0)]
    for below in CUTS:
        for above in CUTS:
            found = fit(span * ((1 - below - above) / 15), low + span * below)
            better = found[2] > best[2]
            best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
    scale, offset, _ = fit(best[0], best[1])
    return scale, offset


def dequantise(weight: Quantised) -> torch.Tensor:
    """Return W, float32 [outputs, inputs], with its columns in the order of the inputs."""
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
    """Return the values of a weight as a dense matrix in `dtype`."""
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
    """Return the values of the codes, float32 [outputs, inputs]."""
    if CODES[weight.scheme.codes].table is None:
        return weight.values.float()
    halves = torch.stack((weight.values & 15, weight.values >> 4), dim=2).flatten(1)
    return table_of(weight.scheme.codes, halves.device)[halves.int()]


@functools.cache
def table_of(codes: Codes, device: torch.device) -> torch.Tensor:
    """Return the table, made once per device: CUDA graphs capture no copy from the host."""
    with torch.inference_mode(False):  # usable in any autograd mode
        return torch.tensor(CODES[codes].table, device=device)


def flat_scales(weight: Quantised) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and offsets as float32, times their units."""
    scales = _times(weight.scales, weight.units)
    offsets = None if weight.offsets is None else _times(weight.offsets, weight.offset_units)
    return scales, offsets


def _times(scales: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
    if units is None:
        return scales.float()
    repeated = units.float().repeat_interleave(scales.shape[1] // units.shape[1], dim=1)
    return scales.float() * repeated
