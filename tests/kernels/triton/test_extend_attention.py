"""The extend kernel, interpreted, against attention in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.triton import attention_plan
from rootlace.kernels.triton.attention_plan import ExtendPlan, TileShape, plan_extend, tile_shapes
from rootlace.kernels.triton.extend_attention import extend_attention
from rootlace.kernels.triton.kv_storage import attention_inputs
from tests.kernels.cases import (
    FP8,
    AttentionCase,
    AttentionTensors,
    exact_attention,
    make_attention,
)

pytestmark = pytest.mark.filterwarnings(
    # Far out tanh is 1 - 2 / inf; over no keys the log-sum-exp is the logarithm of 0.
    "ignore:overflow encountered in exp2",
    "ignore:divide by zero encountered in log2",
)

CPU = torch.device("cpu")
SHAPES = (TileShape(32, 16, 4, 1), TileShape(16, 16, 4, 1))
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED = ((3, 3), (1, 1), (1, 40), (17, 17), (2, 33), (40, 47), (5, 90), (16, 64), (33, 33))


def attend(
    tensors: AttentionTensors,
    plan: ExtendPlan | None = None,
    rows: np.ndarray | None = None,
    lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's results for all rows; NaN where it writes nothing."""
    if rows is None:
        rows = np.arange(len(tensors.batch.context_len))
    if plan is None:
        plan = plan_extend(tensors.batch, rows, tensors.case.window, SHAPES)
    out = torch.full_like(tensors.q, float("nan"))
    sums = torch.full(tensors.q.shape[:2], float("nan"))
    options: dict[str, Any] = tensors.options()
    extend_attention(
        attention_inputs(tensors.q, tensors.k_cache, tensors.v_cache, **options),
        torch.from_numpy(tensors.batch.block_tables),
        plan,
        [torch.from_numpy(array) for array in plan.arrays],
        out,
        sums if lse else None,
    )
    return out, sums


def check(case: AttentionCase) -> None:
    tensors = make_attention(case, CPU)
    out, lse = attend(tensors)
    expected, expected_lse = exact_attention(tensors)
    tolerance = TOLERANCE[case.dtype]
    assert out.dtype == case.dtype
    np.testing.assert_allclose(out.double(), expected, atol=4 * tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=max(5 * TOLERANCE[torch.float32], 2e-5))


@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_ragged_rows(window: int | None) -> None:
    check(AttentionCase(MIXED, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_dtypes(dtype: torch.dtype, fp8: bool) -> None:
    rows = ((3, 3), (1, 40), (17, 50))
    check(AttentionCase(rows, dtype=dtype, kv_dtype=FP8 if fp8 else None, window=30))
    check(AttentionCase(rows, dtype=dtype, kv_dtype=FP8 if fp8 else None, soft_cap=3.0))


@pytest.mark.parametrize(
    ("head_dim", "heads"),
    [(8, (3, 3)), (24, (6, 2)), (24, (3, 3)), (64, (7, 1)), (80, (2, 2)), (80, (4, 1))],
)
def test_head_sizes_and_groups(head_dim: int, heads: tuple[int, int]) -> None:
    check(AttentionCase(((3, 9), (20, 37)), head_dim=head_dim, heads=heads))


@pytest.mark.parametrize("block_size", [1, 4, 24, 32])
def test_block_sizes(block_size: int) -> None:
    check(AttentionCase(((3, 9), (20, 37), (5, 70)), block_size=block_size, window=50))


@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
def test_scale_and_soft_cap(soft_cap: float) -> None:
    for scale in (None, 0.01, 1.0):
        check(AttentionCase(((3, 9), (20, 37)), scale=scale, soft_cap=soft_cap))


@pytest.mark.parametrize(
    ("window", "fp8"), [(None, False), (3, False), (50, False), (90, False), (50, True)]
)
def test_contexts_in_parts(monkeypatch: pytest.MonkeyPatch, window: int | None, fp8: bool) -> None:
    """Rows with few programs: their contexts are cut and merged."""
    monkeypatch.setattr(attention_plan, "SPLIT", 32)
    monkeypatch.setattr(attention_plan, "MIN_PROGRAMS", 8)
    rows = ((2, 100), (6, 33), (9, 40), (7, 7), (70, 90), (17, 120))
    case = AttentionCase(rows, window=window, kv_dtype=FP8 if fp8 else None)
    tensors = make_attention(case, CPU)
    plan = plan_extend(tensors.batch, np.arange(len(rows)), window, SHAPES)
    assert all(len(launch.items) for launch in plan.launches)
    assert len(plan.merges) and (plan.merges[:, 2] >= 2).all()
    assert any((launch.items[:, 6] < 0).any() for launch in plan.launches)
    check(case)


def test_only_the_rows_asked_for_are_written() -> None:
    tensors = make_attention(AttentionCase(MIXED, window=20), CPU)
    expected, _ = attend(tensors)
    rows = np.array([7, 2, 5])
    out, lse = attend(tensors, rows=rows)
    starts = tensors.batch.row_start
    written = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
    rest = np.setdiff1d(np.arange(len(out)), written)
    assert out[rest].isnan().all()
    assert lse[rest].isnan().all()
    assert torch.equal(out[written], expected[written])
    alone, nothing = attend(tensors, rows=rows, lse=False)
    assert torch.equal(alone[written], expected[written])
    assert nothing.isnan().all()


def test_no_rows_write_nothing() -> None:
    tensors = make_attention(AttentionCase(((3, 3),)), CPU)
    out, _ = attend(tensors, rows=np.array([], np.int64))
    assert out.isnan().all()


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_alone_is_the_row_in_a_batch(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT", 32)
    tensors = make_attention(AttentionCase(MIXED, window=window, dtype=torch.bfloat16), CPU)
    together, sums = attend(tensors)
    for row in range(len(MIXED)):
        alone, lse = attend(tensors.alone(row))
        start, stop = tensors.batch.row_start[row : row + 2]
        assert torch.equal(alone, together[start:stop])
        assert torch.equal(lse, sums[start:stop])


def test_strided_queries_and_outputs() -> None:
    """Queries may be a slice of the fused projection."""
    tensors = make_attention(AttentionCase(((3, 9), (20, 37))), CPU)
    expected, _ = attend(tensors)
    wide = torch.full((len(tensors.q), 7, tensors.q.shape[2]), float("nan"))
    wide[:, 1:5] = tensors.q
    out, _ = attend(replace(tensors, q=wide[:, 1:5]))
    assert torch.equal(out, expected)


def test_what_does_not_fit_is_refused() -> None:
    tensors = make_attention(AttentionCase(((3, 9),), scale=-1.0), CPU)
    with pytest.raises(ValueError, match="scale"):
        attend(tensors)
    tensors = make_attention(AttentionCase(((3, 9),), kv_dtype=FP8), CPU)
    with pytest.raises(ValueError, match=r"float8_e4m3fn, where torch\.float32"):
        attend(replace(tensors, scales=None))
    with pytest.raises(ValueError, match="query heads"):
        tile_shapes(90, 128, 256, torch.bfloat16)


@pytest.mark.parametrize("window", [None, 100, 5000])
def test_items_cover_every_visible_key_once(window: int | None) -> None:
    random = np.random.default_rng(3)
    new = random.integers(1, 700, 40)
    context = new + random.integers(0, 9000, 40)
    case = AttentionCase(tuple(zip(new.tolist(), context.tolist(), strict=True)), head_dim=1)
    tensors = make_attention(case, CPU)
    shapes = (TileShape(128, 128, 8, 2), TileShape(64, 64, 4, 2))
    plan = plan_extend(tensors.batch, np.arange(40), window, shapes)
    starts = tensors.batch.row_start
    covered = np.zeros(int(starts[-1]), np.int64)
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for launch in plan.launches:
        sizes = launch.items[:, 5] - launch.items[:, 4]
        assert (np.diff(sizes) <= 0).all(), "the largest come first"
        assert (sizes > 0).all()
        for row, token, count, position, begin, end, part, _ in launch.items.tolist():
            assert starts[row] <= token and token + count <= starts[row + 1]
            assert position == context[row] - (starts[row + 1] - token)
            assert 0 < count <= launch.shape.tokens(2)
            assert begin % launch.shape.block_n == 0
            for index in range(count):
                first = 0 if window is None else max(position + index - window + 1, 0)
                covered[token + index] += max(min(end, position + index + 1) - max(begin, first), 0)
                if part >= 0:
                    parts.setdefault(token + index, []).append((begin, end, part + index))
    seen = np.concatenate([np.arange(c - n, c) + 1 for n, c in case.rows])
    assert (covered == (seen if window is None else np.minimum(seen, window))).all()
    assert len(plan.merges) == len(parts)
    used = []
    for token, first, count, stride in plan.merges.tolist():
        rows = [row for _, _, row in sorted(parts[token])]
        assert rows == [first + i * stride for i in range(count)]
        used += rows
    assert sorted(used) == list(range(plan.num_parts))


def test_tiles_of_the_gpus_divide_the_split() -> None:
    for arch in (80, 90):
        for dim in (64, 80, 96, 128, 192, 256):
            for dtype in (torch.float32, torch.bfloat16):
                for group in (1, 3, 8, 32):
                    for shape in tile_shapes(arch, dim, group, dtype):
                        assert shape.tokens(group) >= 1
                        assert attention_plan.SPLIT % shape.block_n == 0
