"""Decode attention, interpreted, against attention in float64. Nothing is shared here."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.triton import TRITON
from rootlace.kernels.triton.attention import AttentionRules, paged_attention, plan_attention
from rootlace.kernels.triton.attention_plan import SharingRule, SplitRule
from tests.kernels.cases import (
    FP8,
    AttentionCase,
    AttentionTensors,
    exact_attention,
    make_attention,
    poisoned_memory,
)

CPU = torch.device("cpu")
RULES = AttentionRules(SplitRule(least=32, most=4), SharingRule(step_bytes=1 << 60))
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RAGGED = ((1, 1), (1, 150), (1, 31), (1, 32), (1, 33), (1, 97))


def attend(
    tensors: AttentionTensors,
    rows: int | None = None,
    rules: AttentionRules | None = RULES,
    want_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend. With `rows`, as in a family: queries of empty rows are NaN, the array ends with
    garbage."""
    q = tensors.q
    plan = plan_attention(tensors.batch, tensors.case.window, rows, rules)
    arrays = [torch.from_numpy(array) for array in plan.arrays]
    if rows is not None:
        arrays[-1] = torch.cat((arrays[-1], torch.full((7,), 1 << 30, dtype=torch.int32)))
        empty = torch.full((rows - len(q), *q.shape[1:]), float("nan"), dtype=q.dtype)
        q = torch.cat((q, empty))
    with poisoned_memory():
        return paged_attention(
            q,
            tensors.k_cache,
            tensors.v_cache,
            plan.bind(arrays),
            want_lse=want_lse,
            **tensors.options(),  # type: ignore[arg-type]
        )


def check(case: AttentionCase, rules: AttentionRules | None = RULES) -> None:
    tensors = make_attention(case, CPU)
    out, lse = attend(tensors, rules=rules)
    expected, expected_lse = exact_attention(tensors)
    assert out.dtype == case.dtype and lse is not None
    np.testing.assert_allclose(out.double(), expected, atol=4 * TOLERANCE[case.dtype])
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        (torch.float32, None),
        (torch.float32, 1),
        (torch.float32, 20),
        (torch.float32, 64),
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, 64),
    ],
)
def test_ragged_rows(dtype: torch.dtype, window: int | None) -> None:
    check(AttentionCase(RAGGED, dtype=dtype, window=window))


@pytest.mark.parametrize("block_size", [1, 5, 32, 128])
def test_block_sizes(block_size: int) -> None:
    """Blocks that fit tiles of keys are read in another way; windows begin inside of blocks."""
    for window in (None, 70):
        check(AttentionCase(((1, 150), (1, 20)), block_size, (2, 1), window=window))


@pytest.mark.parametrize(
    ("heads", "dim"), [((4, 4), 8), ((6, 2), 24), ((5, 1), 64), ((20, 1), 80), ((2, 1), 256)]
)
def test_groups_and_widths(heads: tuple[int, int], dim: int) -> None:
    check(AttentionCase(((1, 70), (1, 9)), heads=heads, head_dim=dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_scale_soft_cap_and_fp8(dtype: torch.dtype, fp8: bool, soft_cap: float) -> None:
    kv_dtype = FP8 if fp8 else None
    check(
        AttentionCase(
            RAGGED[1:4], dtype=dtype, kv_dtype=kv_dtype, soft_cap=soft_cap, scale=0.3, window=80
        )
    )


def test_large_queries_of_an_fp8_cache() -> None:
    """Products with e4m3 are in float16, with a largest number of 65504."""
    case = AttentionCase(((1, 40),), dtype=torch.bfloat16, kv_dtype=FP8, scale=1e-6)
    tensors = make_attention(case, CPU)
    large = replace(tensors, q=tensors.q * 2**20)
    out, lse = attend(large)
    expected, expected_lse = exact_attention(large)
    assert lse is not None
    np.testing.assert_allclose(out.double(), expected, atol=0.1)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


def test_the_defaults() -> None:
    """The defaults serve a model of this shape with 256 positions per part."""
    check(AttentionCase(((1, 600), (1, 256), (1, 257)), heads=(4, 2), head_dim=64), rules=None)


@pytest.mark.parametrize("window", [None, 45])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(window: int | None) -> None:
    """The row is alone, beside others, in another place, and in a family with empty rows."""
    rows = ((1, 150), (1, 31), (1, 64), (1, 129), (1, 300))
    case = AttentionCase(rows, heads=(2, 1), dtype=torch.bfloat16, window=window)
    tensors = make_attention(case, CPU)
    out, lse = attend(tensors)
    padded, padded_lse = attend(tensors, rows=8)
    assert lse is not None and padded_lse is not None
    assert torch.equal(padded[:5], out) and torch.equal(padded_lse[:5], lse)
    for row in range(len(rows)):
        alone, alone_lse = attend(tensors.alone(row), rows=1)
        assert alone_lse is not None
        assert torch.equal(alone[0], out[row]) and torch.equal(alone_lse[0], lse[row])
    order = np.array([4, 2, 0, 3, 1])
    batch = replace(
        tensors.batch,
        context_len=tensors.batch.context_len[order],
        block_tables=tensors.batch.block_tables[order],
    )
    moved, _ = attend(replace(tensors, batch=batch, q=tensors.q[order]))
    assert torch.equal(moved, out[order])


def test_empty_rows_of_a_family_are_zeros() -> None:
    tensors = make_attention(AttentionCase(((1, 40), (1, 3))), CPU)
    out, lse = attend(tensors, rows=4)
    assert lse is not None
    assert not out[2:].any() and bool((lse[2:] == float("-inf")).all())
    nothing, none = attend(tensors, rows=4, want_lse=False)
    assert none is None and torch.equal(nothing, out)


def test_beside_rows_with_several_new_tokens() -> None:
    rows = ((1, 70), (3, 20), (1, 33), (17, 40), (1, 1), (2, 2))
    for window in (None, 25):
        check(AttentionCase(rows, window=window))
    check(AttentionCase(((3, 20), (17, 40)), dtype=torch.bfloat16))


def test_parts_of_a_context_merge_by_log_sum_exp() -> None:
    """The log-sum-exps show that a window hides earlier positions."""
    tensors = make_attention(AttentionCase(((1, 96),)), CPU)
    whole, _ = attend(tensors)
    near, near_lse = attend(replace(tensors, case=replace(tensors.case, window=40)))
    far = replace(tensors.batch, context_len=np.array([56], np.int32))
    rest, rest_lse = attend(replace(tensors, batch=far))
    assert near_lse is not None and rest_lse is not None
    weight = torch.sigmoid(near_lse - rest_lse)[..., None]
    torch.testing.assert_close(near * weight + rest * (1 - weight), whole, atol=1e-6, rtol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    tensors = make_attention(AttentionCase(((1, 5),), dtype=torch.bfloat16), CPU)
    plan = plan_attention(tensors.batch, None)
    bound = plan.bind([torch.from_numpy(array) for array in plan.arrays])
    k, v = tensors.k_cache, tensors.v_cache
    with pytest.raises(ValueError, match="wanted"):
        paged_attention(tensors.q, k.float(), v, bound)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(tensors.q, k.transpose(0, 1), v, bound)
    with pytest.raises(ValueError, match="at most 256"):
        plan_attention(replace(tensors.batch, head_dim=288), None)
    assert TRITON.paged_attention is paged_attention and TRITON.plan_attention is plan_attention
