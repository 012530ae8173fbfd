"""Writing and copying rows of the paged KV cache.

A cache tensor has the axes [..., num_blocks, block_size, kv_heads, head_dim]; slot
`block * block_size + offset` is one token's place.
"""

from __future__ import annotations

import torch

from rootlace.kernels.interface import slot_bytes

# Kv codes -----------------------------------------------------------------------------------------
#
# A KV cache of integers: each token's keys and values rounded by themselves, group by group.
#
#     offset = floor(min_d x[d])                        rounded down to bfloat16
#     scale = ceil((max_d x[d] - offset) / (2^b - 1))   rounded up to bfloat16; 0 below 2^-100
#     code[d] = clamp(round((x[d] - offset) * (1 / scale)), 0, 2^b - 1)      all 0 where scale is 0
#     value read: code[d] * scale + offset              in float32, then in the requested dtype
#
# With codes of 8 bits (b = 8), a group is all numbers of a head. With 4 bits, a group is 32
# numbers: 16 neighbours and the 16 numbers D / 2 further. The last group may be smaller.
#
# Some channels of keys are large in all tokens and would leave few codes to other channels of their
# group. So keys are mixed before rounding, by a Walsh-Hadamard matrix with entries of one magnitude
# (`mixed`; as QuaRot does, arXiv:2404.00456). Queries are mixed by the same matrix, which keeps
# their products with keys.
#
# The value read is within scale / 2 of x (and the last place of float32), since no x lies outside
# offset ... offset + (2^b - 1) scale. `code * scale` has at most 16 bits and is exact in float32,
# so fusing the sum with the product changes nothing. A number that is not finite makes its whole
# group NaN. So do numbers further apart than float32 reaches.
#
# The stored bytes depend on the token alone. Attention reads stored bytes also for the tokens of
# its own step. So results depend neither on chunks, nor on other rows, nor on the bounds of blocks.
#
# A slot of the cache is one row of bytes. First come the codes of all heads. From the next multiple
# of 4 on, each group has a word, head by head: scale (lower half) and offset (upper half). Zeros
# fill the row up to a multiple of `ALIGNMENT`. Two codes of 4 bits share a byte: number d in the
# lower half, number d + D / 2 in the upper half. So a group is 16 bytes.


GROUP_BYTES = 16
LEAST_SCALE = 2.0**-100
LOWER, UPPER = 0xFFFF, -0x10000
"""Halves of a word, as int32."""

# Triton's kernels call these functions too, so the functions may call no others.


def num_groups(bits: int, dim: int) -> int:
    """Return the number of a head's groups, which is also its number of words."""
    return 1 if bits == 8 else -(-dim // 32)


def words_at(bits: int, heads: int, dim: int) -> int:
    """Return the byte offset of a slot's scales and offsets."""
    return -(-heads * dim * bits // 32) * 4


def mixing_steps(half: int) -> int:
    """Return s: `mixed` mixes 2^s neighbours within each half of a head."""
    return (half & -half).bit_length() - 1


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Mix queries or keys [..., D] by an orthogonal matrix of numbers +-1 / sqrt(2w).

    The matrix mixes each half in groups of w neighbours, then the halves; w is the largest power of
    two that divides D / 2. In float32, rounded once; D is even.
    """
    wide, half = x.float(), x.shape[-1] // 2
    steps = mixing_steps(half)
    for distance in [*(1 << step for step in range(steps)), half]:
        first, second = wide.unflatten(-1, (-1, 2, distance)).unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return wide.mul_((2 << steps) ** -0.5).to(x.dtype)


def quantise(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise finite [M, Nk, D] of any floating-point dtype -> uint8 [M, slot_bytes]."""
    count, heads, dim = values.shape
    wide, top = values.float().unsqueeze(2), float(2**bits - 1)  # [M, Nk, groups, numbers]
    if bits == 4:
        # A smaller group repeats its last byte.
        byte = torch.arange(num_groups(4, dim) * GROUP_BYTES, device=values.device)
        byte = byte.clamp_(max=dim // 2 - 1).view(-1, GROUP_BYTES)
        wide = values.float()[..., torch.cat((byte, byte + dim // 2), dim=1)]
    offset = _rounded_down(wide.amin(3))
    # Divided by a tensor: on a GPU torch multiplies by a number's inverse and rounds differently.
    scale = _rounded_up((wide.amax(3) - offset) / wide.new_full((), top))
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    inverse = torch.where(scale > 0.0, 1.0 / scale, 0.0)
    found = ((wide - offset.unsqueeze(3)) * inverse.unsqueeze(3)).round_().clamp_(0.0, top)
    codes = found.nan_to_num_(0.0).to(torch.uint8)
    if bits == 4:
        codes = codes[..., :GROUP_BYTES] | codes[..., GROUP_BYTES:] << 4
    codes = codes.flatten(2)[..., : dim * bits // 8]
    strange = (wide - wide).sum(3)  # 0, or NaN where a number is not finite
    halves = torch.stack((scale + strange, offset + strange), dim=3).to(torch.bfloat16)
    stored = values.new_zeros((count, slot_bytes(bits, heads, dim)), dtype=torch.uint8)
    stored[:, : heads * dim * bits // 8] = codes.flatten(1)
    words = halves.view(torch.uint8).flatten(1)
    begin = words_at(bits, heads, dim)
    stored[:, begin : begin + words.shape[1]] = words
    return stored


def dequantise(
    stored: torch.Tensor, bits: int, heads: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Convert uint8 [M, slot_bytes] -> [M, Nk, D] in `dtype`."""
    codes = stored[:, : heads * dim * bits // 8].unflatten(1, (heads, -1))
    begin, groups = words_at(bits, heads, dim), num_groups(bits, dim)
    words = stored[:, begin : begin + 4 * heads * groups].contiguous().view(torch.bfloat16)
    scale, offset = words.float().view(-1, heads, groups, 2).unbind(3)
    if bits == 4:
        scale, offset = (
            part.repeat_interleave(GROUP_BYTES, dim=2)[..., : dim // 2].repeat(1, 1, 2)
            for part in (scale, offset)
        )
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
    return codes.float().mul_(scale).add_(offset).to(dtype)


def _rounded_down(x: torch.Tensor) -> torch.Tensor:
    """Round float32 down to the next bfloat16. Dropping the lower half of its bits rounds towards
    zero."""
    pattern = x.view(torch.int32)
    return (torch.where(pattern < 0, pattern + LOWER, pattern) & UPPER).view(torch.float32)


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """Round non-negative float32 up to the next bfloat16."""
    return ((x.view(torch.int32) + LOWER) & UPPER).view(torch.float32)


# Kv cache -----------------------------------------------------------------------------------------


def write_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> None:
    """Set cache[slots[i]] = new[tokens[i]], for keys and values of one layer, in place.

    k_cache, v_cache [B, S, N, D]; k, v [T, N, D]; slots int64 [M]. `tokens` int64 [M]: the token
    for each slot; None: tokens in order (M = T). No slot may appear twice.
    """
    if tokens is not None:
        k, v = k.index_select(0, tokens), v.index_select(0, tokens)
    shape = (-1, *k_cache.shape[2:])
    _bits(k_cache).view(shape).index_copy_(0, slots, _bits(k))
    _bits(v_cache).view(shape).index_copy_(0, slots, _bits(v))


def copy_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Set cache[target[i]] = cache[source[i]] in every layer at once, in place.

    cache [L, B, S, N, D] (layers, keys and values, are one axis L); source, target int64 [M] slots.
    No target may also be a source, or appear twice.
    """
    flat = _bits(cache).view(cache.shape[0], -1, *cache.shape[3:])
    flat.index_copy_(1, target, flat.index_select(1, source))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return fp8 as bytes, which torch can index on every device; any other dtype unchanged."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values
