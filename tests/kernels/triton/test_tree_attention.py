"""Attention of rows that share parts of their contexts, against float64 and the per-row kernel."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.triton.attention import AttentionRules, plan_attention
from rootlace.kernels.triton.attention_plan import SharingRule, SplitRule
from rootlace.kernels.triton.decode_attention import tree_tile
from tests.kernels.cases import FP8, AttentionCase, exact_attention, make_attention
from tests.kernels.triton.test_decode_attention import CPU, RULES, TOLERANCE, attend

EAGER = SharingRule(node_bytes=0, step_bytes=0, least_segment=32, programs=8, unit=16)
SHARING = AttentionRules(SplitRule(least=32, most=4), EAGER, tile=16)

ROWS = ((1, 130), (1, 177), (1, 161), (1, 64), (1, 65), (1, 5))
NESTED = ((0, 5, 48), (0, 3, 128), (1, 3, 160))
"""Nested runs: all but the last row share 48 tokens, three rows share 128, two of these 160."""


def check(case: AttentionCase, rules: AttentionRules = SHARING, rows: int | None = None) -> None:
    tensors = make_attention(case, CPU)
    plan = plan_attention(tensors.batch, case.window, rows, rules)
    assert plan.decode is not None and plan.decode.numbers[1] > 0
    out, lse = attend(tensors, rows, rules)
    expected, expected_lse = exact_attention(tensors)
    count = len(expected)
    assert out.dtype == case.dtype and lse is not None
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(out[:count].double(), expected, atol=4 * tolerance)
    np.testing.assert_allclose(lse[:count], expected_lse, atol=2e-5)
    assert not out[count:].any()


@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        (torch.float32, None),
        (torch.float32, 40),
        (torch.float32, 100),
        (torch.float16, None),
        (torch.bfloat16, 100),
    ],
)
def test_nested_sharing(dtype: torch.dtype, window: int | None) -> None:
    check(AttentionCase(ROWS, shared=NESTED, dtype=dtype, window=window))


def test_sharing_changes_the_order_of_sums_only() -> None:
    tensors = make_attention(AttentionCase(ROWS, shared=NESTED), CPU)
    shared, _ = attend(tensors, rules=SHARING)
    each, _ = attend(tensors, rules=RULES)
    torch.testing.assert_close(shared, each, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("heads", "tile"), [((4, 4), 16), ((3, 1), 16), ((5, 1), 64)])
def test_tiles_of_rows_and_heads(heads: tuple[int, int], tile: int) -> None:
    """Groups that do not divide a tile: the heads of a row are in two tiles."""
    rows = tuple((1, 36 + i) for i in range(7))
    check(
        AttentionCase(rows, heads=heads, shared=((0, 7, 32),), head_dim=24),
        replace(SHARING, tile=tile),
    )


@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("window", [None, 75])
def test_block_sizes(block_size: int, window: int | None) -> None:
    tokens = 64 if block_size != 5 else 60
    shared = ((0, 4, tokens), (1, 3, 2 * tokens))
    rows = ((1, 90), (1, 150), (1, 129), (1, 66))
    check(AttentionCase(rows, block_size, (2, 1), shared=shared, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_soft_cap_and_fp8(dtype: torch.dtype) -> None:
    case = AttentionCase(ROWS, shared=NESTED, dtype=dtype, kv_dtype=FP8, scale=0.3, soft_cap=3.0)
    check(case)
    check(replace(case, soft_cap=0.0, window=60))


def test_in_a_family_with_empty_rows() -> None:
    check(AttentionCase(ROWS, shared=NESTED), rows=8)


def test_beside_rows_with_several_new_tokens() -> None:
    rows = ((1, 130), (1, 177), (3, 161), (1, 64), (1, 65), (9, 12))
    check(AttentionCase(rows, shared=((0, 2, 128), (3, 5, 48))))


def test_many_levels() -> None:
    """More partial results per row than the merge takes at a time, some of which see nothing."""
    count = 18
    rows = tuple((1, 40 + 16 * i) for i in range(count))
    shared = tuple((i, count, 16 * (i + 1)) for i in range(count - 1))
    rules = AttentionRules(SplitRule(least=32, most=32), EAGER, tile=16)
    check(AttentionCase(rows, shared=shared, heads=(1, 1), window=90), rules)


def test_tiles_hold_what_there_is() -> None:
    bf16 = torch.bfloat16
    assert tree_tile(2, 1, 128, bf16) == 16
    assert tree_tile(8, 4, 128, bf16) == 32
    assert tree_tile(9, 4, 128, bf16) == 64
    assert tree_tile(256, 8, 128, bf16) == 128
    assert tree_tile(256, 8, 256, bf16) == 64
    assert tree_tile(256, 8, 128, torch.float32) == 32
