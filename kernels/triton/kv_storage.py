"""A KV cache, whatever it is stored in: how kernels are given it, check it and read it."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import KVCodes, KVScaling
from rootlace.kernels.reference.kv_cache import slot_bytes
from rootlace.kernels.triton.kv_codes import load_codes
from rootlace.kernels.triton.numerics import from_e4m3

Stored = Literal["plain", "fp8", "int8", "int4"]
"""What variants of kernels are named by."""


def stored_signature(stored: Stored, plain: str) -> tuple[dict[str, str], dict[str, Any]]:
    """(types of a kernel's arguments, what is constant of them): of attention over a cache that is
    stored so, for queries of the type `plain`."""
    cache = f"*{plain}" if stored == "plain" else "*u8"
    scales = {"plain": "constexpr", "fp8": "*fp32"}.get(stored, "*i32")
    types = {"k_cache": cache, "v_cache": cache, "k_scales": scales, "v_scales": scales}
    constants: dict[str, Any] = {
        "FP8": stored == "fp8",
        "BITS": {"int8": 8, "int4": 4}.get(stored, 0),
    }
    if stored == "plain":
        constants |= {"k_scales": None, "v_scales": None}
    return types, constants


def bits_of(scales: KVScaling | None) -> int:
    """Of the integers of a cache; 0: it holds others."""
    return scales.bits if isinstance(scales, KVCodes) else 0


def scale_arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScaling | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where kernels find the scales of keys and of values: among integers, in the cache's words."""
    if scales is None:
        return None, None
    if isinstance(scales, KVCodes):
        return k_cache.view(torch.int32), v_cache.view(torch.int32)
    return scales.k, scales.v


@triton.jit
def load_heads(
    cache, scales, slot, head, column, seen, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    FP8: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys or values [N, columns] of a head at slots int64 [N], in `dtype`; 0 where not `seen`:
    slots that nobody has written may hold anything. Those of fp8 are not scaled yet."""
    if BITS:
        found = load_codes(cache, scales, slot, head, column, seen, dtype, KV_HEADS, DIM, BITS)
    else:
        inside = seen[:, None]
        if column.shape[0] != DIM:
            inside &= (column < DIM)[None, :]
        place = cache + head * DIM + (slot[:, None] * (KV_HEADS * DIM) + column[None, :])
        found = tl.load(place, mask=inside, other=0)
        if FP8:
            found = from_e4m3(found, dtype, NATIVE)
    return found


def check_cache(
    name: str, cache: torch.Tensor, heads: torch.Tensor, scales: KVScaling | None
) -> None:
    """Raises ValueError for a layer's keys or values that are not stored as `scales` say, for the
    dtype and width of `heads` [T, N, D]."""
    dtype, dim = heads.dtype, heads.shape[2]
    shape = tuple(cache.shape[2:])
    if isinstance(scales, KVCodes):
        dtype, wanted = torch.uint8, (1, slot_bytes(scales.bits, scales.heads, dim))
    else:
        dtype, wanted = dtype if scales is None else torch.float8_e4m3fn, (shape[0], dim)
    if cache.dtype != dtype:
        raise ValueError(f"{name} are {cache.dtype}, where {dtype} is wanted")
    if not cache.is_contiguous():
        raise ValueError(f"the {name} of a layer must be contiguous")
    if shape != wanted:
        raise ValueError(f"the slots of {name} are {list(shape)}, where {list(wanted)} is wanted")
