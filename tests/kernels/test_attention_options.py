"""Reference attention with a scale, a soft cap and fp8 caches, against the formula in float64."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.attention import from_e4m3
from tests.kernels.cases import FP8, INTEGERS, AttentionCase, exact_attention, make_attention

CPU = torch.device("cpu")
MIXED = ((1, 9), (5, 12), (1, 33), (16, 16), (1, 1), (12, 49), (1, 50))
SHARED = ((1, 50), (1, 49), (1, 40), (12, 49))


def check(case: AttentionCase, tolerance: float) -> None:
    tensors = make_attention(case, CPU)
    plan = REFERENCE.plan_attention(tensors.batch, case.window)
    with torch.inference_mode():
        out, lse = REFERENCE.paged_attention(
            tensors.q,
            tensors.k_cache,
            tensors.v_cache,
            plan,
            scale=case.scale,
            soft_cap=case.soft_cap,
            scales=tensors.scales,
            want_lse=True,
        )
    expected, expected_lse = exact_attention(tensors)
    assert out.dtype == case.dtype and lse is not None and lse.dtype == torch.float32
    np.testing.assert_allclose(out.double(), expected, atol=tolerance)
    exact_scores = case.dtype == torch.float32 or case.kv_dtype == FP8
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5 if exact_scores else 2e-2)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0, 30.0])
@pytest.mark.parametrize("scale", [None, 0.05, 1.0])
def test_scale_and_soft_cap(scale: float | None, soft_cap: float, window: int | None) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        for heads in ((4, 4), (6, 2), (4, 1)):
            case = AttentionCase(
                MIXED, heads=heads, dtype=dtype, scale=scale, soft_cap=soft_cap, window=window
            )
            check(case, tolerance)
            check(replace(case, rows=SHARED, shared=((0, 4, 16), (0, 2, 32))), tolerance)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_fp8_caches(soft_cap: float, window: int | None) -> None:
    """Everything is in float32: only the output is rounded."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for heads in ((4, 4), (6, 2)):
            case = AttentionCase(
                MIXED, heads=heads, dtype=dtype, kv_dtype=FP8, soft_cap=soft_cap, window=window
            )
            check(case, tolerance)
            check(replace(case, rows=SHARED, shared=((0, 4, 16),)), tolerance)


@pytest.mark.parametrize("kv_dtype", INTEGERS)
def test_caches_of_integers(kv_dtype: torch.dtype) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        case = AttentionCase(MIXED, heads=(6, 2), dtype=dtype, kv_dtype=kv_dtype, window=6)
        check(case, tolerance)
        check(replace(case, rows=SHARED, shared=((0, 4, 16),), window=None), tolerance)


def test_every_8_bit_float_is_read_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(2, 127, 1).transpose(0, 1)  # [127, 2, 1]
    scale = torch.tensor([1.0, 0.375])
    found = from_e4m3(codes.contiguous().view(FP8), scale)
    exact = codes.contiguous().view(FP8).double() * scale.double()[:, None]
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), exact)
