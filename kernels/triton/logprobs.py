"""Log-probabilities of tokens: `reference/sampling.py`.

One pass: each tile of a row gives its largest logit and its mass relative to that; then one program
per row merges them and looks up the token. Tiles are the same whatever the batch is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.launching import Variant, settings
from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture, padded


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
    logits_ptr,
    token_ptr,
    largest_ptr,
    mass_ptr,
    out_ptr,
    stride,
    tiles,
    TILES: tl.constexpr,
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
    """logits float32 or bfloat16 [R, V], tokens int [R] -> float32 [R]; NaN where a token is -1."""
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


def variants(arch: int) -> list[Variant]:
    launch = settings("token_logprobs", arch)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        name = TYPE_NAMES[dtype]
        pointers = {"logits_ptr": f"*{name}"}
        stats = {"largest_ptr": "*fp32", "mass_ptr": "*fp32"}
        found.append(
            Variant(
                name,
                tile_mass_kernel,
                {**pointers, **stats},
                {"TILE": launch.blocks["TILE"]},
                ("logits_ptr", *stats, "stride"),
                num_warps=launch.num_warps,
            )
        )
        found.append(
            Variant(
                name,
                row_logprob_kernel,
                {**pointers, **stats, "out_ptr": "*fp32"},
                {"TILES": 32},
                ("logits_ptr", "token_ptr", *stats, "out_ptr", "stride"),
                num_warps=1,
            )
        )
    return found
