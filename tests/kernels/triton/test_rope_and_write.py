"""Norm, rotation and KV write in Triton against float64 and the reference."""

import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import KVScales
from rootlace.kernels.triton import TRITON
from tests.kernels.cases import FP8
from tests.kernels.pointwise_cases import RopeCase, check_rope_and_write, normal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BASE = RopeCase()


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        replace(BASE, dtype=torch.float32),
        replace(BASE, dtype=torch.float16),
        replace(BASE, heads=(9, 3), head_dim=80),
        replace(BASE, heads=(20, 1), head_dim=6, tokens=1),
        replace(BASE, heads=(2, 2), head_dim=64, block_size=1),
        replace(BASE, tokens=0),
        replace(BASE, norm=True),
        replace(BASE, norm=True, dtype=torch.float32, head_dim=24),
        replace(BASE, duplicates=4),
        replace(BASE, duplicates=3, norm=True, dtype=torch.float32),
        replace(BASE, fp8=True),
        replace(BASE, fp8=True, norm=True, duplicates=2, heads=(6, 3), head_dim=20),
        replace(BASE, fp8=True, dtype=torch.float32),
        replace(BASE, bits=8, duplicates=2),
        replace(BASE, bits=4, heads=(3, 3), head_dim=20),
        replace(BASE, bits=4, norm=True, dtype=torch.float32, head_dim=32),
        replace(BASE, bits=4, heads=(6, 3), head_dim=128, duplicates=2),
        replace(BASE, bits=4, heads=(2, 1), head_dim=80),
    ],
    ids=str,
)
def test_rope_and_write(case: RopeCase) -> None:
    check_rope_and_write(TRITON, DEVICE, case)


def test_queries_may_be_normed_alone() -> None:
    """q_norm without k_norm."""
    qkv = normal(2, 4, 8, dtype=torch.float32, device=DEVICE)
    ones = torch.ones(2, 4, device=DEVICE)
    cache = torch.zeros(2, 1, 4, 1, 8, device=DEVICE)
    slots = torch.tensor([2, 0], device=DEVICE)
    q = TRITON.rope_and_write(
        qkv,
        ones,
        torch.zeros_like(ones),
        cache[0],
        cache[1],
        slots,
        q_norm=torch.ones(8, device=DEVICE),
        eps=1e-12,
    )
    root = qkv[:, :2].square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(q, qkv[:, :2] / root)
    assert torch.equal(cache[0, 0, slots, 0], qkv[:, 2])
    assert torch.equal(cache[1, 0, slots, 0], qkv[:, 3])


def test_a_cache_of_another_kind_is_refused() -> None:
    qkv = torch.zeros(1, 3, 8, device=DEVICE)
    turn = torch.zeros(1, 4, device=DEVICE)
    slots = torch.tensor([0], device=DEVICE)
    scale = torch.ones(1, device=DEVICE)
    cache = torch.zeros(1, 4, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"where torch\.float8_e4m3fn is wanted"):
        TRITON.rope_and_write(qkv, turn, turn, cache, cache, slots, scales=KVScales(scale, scale))
    with pytest.raises(ValueError, match=r"where torch\.float32 is wanted"):
        TRITON.rope_and_write(qkv, turn, turn, cache.to(FP8), cache.to(FP8), slots)
    with pytest.raises(ValueError, match="contiguous"):
        apart = torch.zeros(1, 4, 2, 8, device=DEVICE)[:, :, :1]
        TRITON.rope_and_write(qkv, turn, turn, apart, apart, slots)
    with pytest.raises(ValueError, match=r"\[1, 6\], where \[1, 8\]"):
        small = torch.zeros(1, 4, 1, 6, device=DEVICE)
        TRITON.rope_and_write(qkv, turn, turn, small, small, slots)
