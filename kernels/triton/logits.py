"""Logits: biases, bans, masks, penalties and log-probabilities, as in `reference/sampling.py`.

Editing is one pass over the logits. A program has one tile of one row and copies the tile, masked,
to float32. Then it finds the tile's entries in the row's two lists, which are sorted by token, and
changes these tokens in the copy. The search compares 128 entries at once. Traffic: 2 + 4 bytes per
logit (bf16), a bit for the mask, and the lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import LogitEdits
from rootlace.kernels.triton.launching import architecture, padded, settings

# Rows ---------------------------------------------------------------------------------------------
#
# Helpers for rows of logits: masked loads, keys that order logits, masses, random numbers.
#
# Masses are sums of weights w = exp((x - max x) / T), in float64.
#
# Arguments that belong together are one tuple: `source` is (logits_ptr, stride, mask_ptr,
# mask_row_ptr, words, vocab), `asked` is (temperature_ptr, top_k_ptr, top_p_ptr, vocab).

MAX_VOCAB = 1 << 24
"""Exclusive bound of vocabularies: a rank (`rank_of`) has 24 bits for the token."""
EVERYTHING = tl.constexpr(-(1 << 62))
"""Rank below all ranks of tokens."""


@triton.jit
def load_logits(source, row, ids, MASKED: tl.constexpr):
    """Load logits of tokens `ids` of a row as float32; -inf outside, and where the row's mask
    forbids."""
    logits_ptr, stride, mask_ptr, mask_row_ptr, words, vocab = source
    inside = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    if MASKED:
        mask_row = tl.load(mask_row_ptr + row)
        if mask_row >= 0:
            word = ids // 32
            place = mask_ptr + mask_row.to(tl.int64) * words + word
            bits = tl.load(place, mask=inside & (word < words), other=0)
            x = tl.where(((bits >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def order_key(x):
    """Return int32 keys that order float32 as numbers: -0.0 equals 0.0, NaN is above everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def key_value(key):
    """Return the float32 with the `order_key` `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(x, ids):
    """Return ranks as int64: larger for a larger logit and, of equal logits, for a smaller id."""
    return (order_key(x).to(tl.int64) << 24) | (0xFFFFFF - ids)


@triton.jit
def rank_key(rank):
    """Return the int32 `order_key` in a rank."""
    return (rank >> 24).to(tl.int32)


@triton.jit
def rank_id(rank):
    """Return the int32 token in a rank."""
    return (0xFFFFFF - (rank & 0xFFFFFF)).to(tl.int32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """Return float64 in [0, 1) from int64 seed and position, as `reference/sampling.py` does."""
    stream = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    counter = position.to(tl.uint64, bitcast=True) + 1
    bits = _mix(stream + counter * 0x9E3779B97F4A7C15) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def inverse_of(temperature):
    """Return 1 / T, finite, so that its product with 0 is 0."""
    return tl.minimum(1.0 / temperature, 1.0e308)


@triton.jit
def largest_of(best_ptr, row, tiles, TILES: tl.constexpr):
    """Return (rank of the row's best token, its logit, whether the logit is a finite number)."""
    tile = tl.arange(0, TILES)
    ranks = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=EVERYTHING)
    rank = tl.max(ranks, 0)
    key = rank_key(rank)
    # The keys of -inf, and of +inf; NaN is above it.
    finite = (key > -2139095041) & (key < 2139095040)
    return rank, key_value(key), finite


@triton.jit
def cut_parameters(row, finite, params):
    """Return (whether the row has top-k or top-p to search for, top_k, top_p)."""
    temperature_ptr, top_k_ptr, top_p_ptr, vocab = params
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    cut = (top_k < vocab) | (top_p < 1.0)
    return finite & cut & (tl.load(temperature_ptr + row) > 0), top_k, top_p


@triton.jit
def row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES: tl.constexpr):
    """Return the tiles' masses relative to the row's largest logit, float64 [TILES]."""
    tile = tl.arange(0, TILES)
    there = tile < tiles
    ranks = tl.load(best_ptr + row * tiles + tile, mask=there, other=EVERYTHING)
    tops = tl.where(there, key_value(rank_key(ranks)), float("-inf"))
    mass = tl.load(mass_ptr + row * tiles + tile, mask=there, other=0.0)
    share = tl.exp((tops.to(tl.float64) - largest.to(tl.float64)) * inverse)
    return tl.where(tops > float("-inf"), mass * share, 0.0)


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
"""Names of `LogitEdits.penalties` that the kernel reads, in the order of its arguments."""


@triton.jit
def _first_from(token_ptr, low, high, wanted, ENTRIES: tl.constexpr):
    """Return the first place in low..high-1 whose token is at least `wanted`; `high` if none is.
    Tokens ascend. Every round narrows the places to one in ENTRIES."""
    while high > low:
        step = (high - low + ENTRIES - 1) // ENTRIES
        places = low + tl.arange(0, ENTRIES) * step
        tokens = tl.load(token_ptr + places, mask=places < high, other=0x7FFFFFFF)
        below = tl.sum((tokens < wanted).to(tl.int32), 0)
        # The place lies behind sample `below` - 1, the last below `wanted`.
        high = tl.minimum(low + below * step, high)
        low = tl.where(below > 0, low + (below - 1) * step + 1, high)
    return low


@triton.jit
def edit_logits_kernel(
    source,
    bias_start_ptr,
    bias_token_ptr,
    bias_ptr,
    seen_start_ptr,
    seen_token_ptr,
    seen_count_ptr,
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    out_ptr,
    vocab,
    MASKED: tl.constexpr,
    BIASED: tl.constexpr,
    PENALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = load_logits(source, row, ids, MASKED)
    out = out_ptr + row.to(tl.int64) * vocab
    tl.store(out + ids, x, mask=inside)
    begin, end = tile * BLOCK, tile * BLOCK + BLOCK
    entry = tl.arange(0, ENTRIES)
    if BIASED:
        # A bias cannot change a masked logit (-inf), so the mask may come first.
        start, stop = tl.load(bias_start_ptr + row), tl.load(bias_start_ptr + row + 1)
        start = _first_from(bias_token_ptr, start, stop, begin, ENTRIES)
        stop = _first_from(bias_token_ptr, start, stop, end, ENTRIES)
        if start < stop:
            tl.debug_barrier()  # other threads stored the logits changed here
            for first in range(start, stop, ENTRIES):
                there = first + entry < stop
                token = tl.load(bias_token_ptr + first + entry, mask=there, other=0)
                bias = tl.load(bias_ptr + first + entry, mask=there, other=0.0)
                old = tl.load(out + token, mask=there, other=0.0)
                banned = bias == float("-inf")
                tl.store(out + token, tl.where(banned, bias, old + bias), mask=there)
    if PENALISED:
        start, stop = tl.load(seen_start_ptr + row), tl.load(seen_start_ptr + row + 1)
        start = _first_from(seen_token_ptr, start, stop, begin, ENTRIES)
        stop = _first_from(seen_token_ptr, start, stop, end, ENTRIES)
        if start < stop:
            tl.debug_barrier()
            factor = tl.load(repetition_penalty_ptr + row).to(tl.float32)
            frequency = tl.load(frequency_penalty_ptr + row)
            presence = tl.load(presence_penalty_ptr + row)
            for first in range(start, stop, ENTRIES):
                there = first + entry < stop
                token = tl.load(seen_token_ptr + first + entry, mask=there, other=0)
                count = tl.load(seen_count_ptr + first + entry, mask=there, other=0)
                old = tl.load(out + token, mask=there, other=0.0)
                scaled = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
                amount = frequency * count.to(tl.float64) + presence
                amount = tl.where(count > 0, amount, 0.0)
                tl.store(out + token, scaled - amount.to(tl.float32), mask=there)


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Edit logits float32 or bfloat16 [R, V] -> float32 [R, V], new. See `interface.EditLogits`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab = logits.shape
    out = torch.empty((count, vocab), dtype=torch.float32, device=logits.device)
    if not out.numel():
        return out
    launch = settings("edit_logits", architecture(logits.device))
    block = launch.blocks["BLOCK"]
    penalties = edits.penalties or dict.fromkeys(PENALTIES, out)
    words = 0 if edits.mask_table is None else edits.mask_table.shape[1]
    edit_logits_kernel[(triton.cdiv(vocab, block), count)](
        # Any tensor stands in for one that the launch does not read.
        (
            *(logits, logits.stride(0), _or(edits.mask_table, out), _or(edits.mask_row, out)),
            *(words, vocab),
        ),
        _or(edits.bias_start, out),
        _or(edits.bias_token, out),
        _or(edits.bias, out),
        _or(edits.seen_start, out),
        _or(edits.seen_token, out),
        _or(edits.seen_count, out),
        *(penalties[name] for name in PENALTIES),
        out,
        vocab,
        MASKED=edits.mask_row is not None,
        BIASED=edits.bias_start is not None,
        PENALISED=edits.seen_start is not None,
        BLOCK=block,
        ENTRIES=launch.blocks["ENTRIES"],
        num_warps=launch.num_warps,
        # The repetition penalty's product is rounded before the other penalties are subtracted.
        enable_fp_fusion=False,
    )
    return out


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


# Log-probabilities of tokens: `reference/sampling.py`.
#
# One pass: each tile of a row gives its largest logit and its mass relative to that logit. Then one
# program per row merges the tiles and looks up the token. Tiles do not depend on the batch.


@triton.jit
def tile_mass_kernel(logits_ptr, largest_ptr, mass_ptr, vocab, stride, tiles, TILE: tl.constexpr):
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    place = logits_ptr + row.to(tl.int64) * stride + ids
    x = tl.load(place, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(largest_ptr + row * tiles + tile, largest)
    tl.store(mass_ptr + row * tiles + tile, tl.sum(tl.exp(x - base), 0))


@triton.jit
def row_logprob_kernel(
    logits_ptr, token_ptr, largest_ptr, mass_ptr, out_ptr, stride, tiles, TILES: tl.constexpr
):
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    tops = tl.load(largest_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    mass = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    largest = tl.max(tops, 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    shares = tl.where(tops > float("-inf"), mass * tl.exp(tops - base), mass)
    token = tl.load(token_ptr + row)
    chosen = logits_ptr + row.to(tl.int64) * stride + tl.maximum(token, 0)
    found = tl.load(chosen).to(tl.float32) - (base + tl.log(tl.sum(shares, 0)))
    tl.store(out_ptr + row, tl.where(token >= 0, found, float("nan")))


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the log-probabilities of tokens int [R] from logits float32 or bfloat16 [R, V] ->
    float32 [R]; NaN for a token of -1."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab = logits.shape
    if out is None:
        out = torch.empty(count, dtype=torch.float32, device=logits.device)
    if not count:
        return out
    launch = settings("token_logprobs", architecture(logits.device))
    tile = launch.blocks["TILE"]
    tiles = triton.cdiv(vocab, tile)
    largest = torch.empty((count, tiles), dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(largest)
    stride = logits.stride(0)
    tile_mass_kernel[(tiles, count)](
        logits, largest, mass, vocab, stride, tiles, TILE=tile, num_warps=launch.num_warps
    )
    row_logprob_kernel[(count,)](
        logits, tokens, largest, mass, out, stride, tiles, TILES=padded(tiles), num_warps=1
    )
    return out
