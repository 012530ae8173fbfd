"""Attention in C++ against float64 and the reference, for several kinds of processor.

Cases (`tests/kernels/cases.py`) have NaN in every slot that holds no token of a row; outputs are
NaN before each call.
"""

import ctypes
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from rootlace.kernels.dispatch import kernels_for
from rootlace.kernels.interface import KVCodes
from rootlace.kernels.shared_runs import chosen_runs, whole_blocks
from tests.kernels.cases import (
    INTEGERS,
    AttentionCase,
    AttentionTensors,
    exact_attention,
    make_attention,
    relative_error,
)
from tests.kernels.native.layouts import attend, codes_laid_out, laid_out
from tests.native import TARGETS, library_for, with_tile_unit

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
LSE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
THREADS = (1, 2, 5, 64)

# (new tokens, context) per row: decode, extend and prefill, around the borders of key blocks (64)
# and segments (1024).
MIX = ((1, 9), (5, 12), (1, 65), (16, 16), (1, 1), (2, 64), (70, 130), (1, 300), (4, 1026))
SHAPES = (  # (heads, key heads), head_dim, block_size
    ((4, 4), 16, 1),
    ((4, 2), 64, 16),
    ((6, 2), 64, 4),
    ((4, 1), 80, 64),
    ((8, 1), 96, 128),
    ((3, 1), 128, 5),
    ((2, 2), 256, 16),
    ((7, 1), 6, 16),
    ((2, 1), 2, 3),
)


class Machine:
    """The kernel for one kind of processor, with teams of several sizes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.teams = {threads: library.rl_team_new(threads) for threads in THREADS}

    def attend(
        self,
        tensors: AttentionTensors,
        threads: int = 1,
        runs: Sequence[tuple[int, int, int, int]] = (),
    ) -> tuple[Tensor, Tensor]:
        """out [T, Nq, D], lse [T, Nq]."""
        q = tensors.q
        out = torch.full(q.shape, float("nan"), dtype=q.dtype)
        lse = torch.full(q.shape[:2], float("nan"))
        caches, codes = (tensors.k_cache, tensors.v_cache), tensors.scales
        if isinstance(codes, KVCodes):
            keys, values = codes_laid_out(*caches, codes, tensors.case.head_dim)
        else:
            keys, values, codes = *laid_out(*caches), None
        attend(
            self.library,
            self.teams[threads],
            q,
            keys,
            values,
            tensors.batch,
            runs=runs,
            window=tensors.case.window,
            scale=tensors.case.scale,
            soft_cap=tensors.case.soft_cap,
            codes=codes,
            out=out,
            lse=lse,
        )
        return out, lse


@pytest.fixture(scope="module", params=TARGETS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    library = library_for(request.param)
    machine = Machine(library)
    yield machine
    for team in machine.teams.values():
        library.rl_team_free(team)


def assert_right(tensors: AttentionTensors, found: tuple[Tensor, Tensor]) -> None:
    expected, expected_lse = exact_attention(tensors)
    dtype = tensors.q.dtype
    assert relative_error(found[0], expected) < TOLERANCE[dtype]
    assert float((found[1] - expected_lse).abs().max()) < LSE_TOLERANCE[dtype]


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def pieces(tensors: AttentionTensors, row: int, size: int) -> Iterator[AttentionTensors]:
    """Yield a row's new tokens in steps of `size`, each alone, as if later tokens came later."""
    alone = tensors.alone(row)
    new, context = len(alone.q), int(alone.batch.context_len[0])
    for start in range(0, new, size):
        stop = min(start + size, new)
        batch = replace(
            alone.batch,
            row_start=np.array([0, stop - start], np.int32),
            context_len=np.array([context - new + stop], np.int32),
        )
        yield replace(alone, batch=batch, q=alone.q[start:stop])


def all_runs(tensors: AttentionTensors, least: int = 1) -> list[tuple[int, int, int, int]]:
    """Return every run of rows with blocks in common, with any savings."""
    batch = tensors.batch
    new = np.diff(batch.row_start)
    whole = whole_blocks(batch.context_len - new + 1, np.ones(len(new), bool), batch.block_size)
    runs = chosen_runs(batch.block_tables, whole, lambda run: run.high - run.low >= least)
    return [(run.begin, run.end, run.low, run.high) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 70, 900])
def test_equals_the_formula(machine: Machine, dtype: torch.dtype, window: int | None) -> None:
    # Windows that cut somewhere: with every second shape, others for each.
    taken = {None: SHAPES, 1: SHAPES[::3], 70: SHAPES[1::2], 900: SHAPES[::2]}[window]
    for heads, dim, block_size in taken:
        case = AttentionCase(MIX, block_size, heads, dim, dtype, window=window)
        tensors = make_attention(case, CPU)
        found = machine.attend(tensors)
        assert_right(tensors, found)
        for threads in THREADS[1:]:
            assert_same(machine.attend(tensors, threads), found)


@pytest.mark.parametrize("kv_dtype", INTEGERS)
def test_integers_are_read_as_what_they_stand_for(machine: Machine, kv_dtype: torch.dtype) -> None:
    """Results are equal to the bit, with any fetches during the computation of others."""
    shapes = (
        *(((4, 2), 64, 16, None), ((8, 1), 96, 128, 70)),
        *(((6, 6), 32, 48, None), ((4, 2), 256, 16, None)),
    )
    for dtype, (heads, dim, block_size, window) in itertools.product(DTYPES, shapes):
        case = AttentionCase(MIX, block_size, heads, dim, dtype, kv_dtype, window)
        tensors = make_attention(case, CPU)
        expected = machine.attend(tensors.plain())
        for threads in (1, 5):
            assert_same(machine.attend(tensors, threads), expected)
        assert bool(expected[0].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_near_to_float64_as_the_reference(machine: Machine, dtype: torch.dtype) -> None:
    tensors = make_attention(AttentionCase(MIX, 16, (6, 2), 64, dtype), CPU)
    expected, _ = exact_attention(tensors)
    reference = kernels_for(CPU)
    plan = reference.plan_attention(tensors.batch, None)
    other, _ = reference.paged_attention(tensors.q, tensors.k_cache, tensors.v_cache, plan)
    ours = relative_error(machine.attend(tensors)[0], expected)
    assert ours < 1.3 * relative_error(other, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_has_the_same_bits_in_any_company(
    machine: Machine, dtype: torch.dtype, window: int | None
) -> None:
    """Alone, in a batch, in chunks of any size, token by token."""
    rows = ((1, 70), (150, 150), (33, 1100), (1, 2100), (3, 64))
    dim, cap = (24, 0.0) if window is None else (16, 4.0)
    case = AttentionCase(rows, 16, (6, 2), dim, dtype, window=window, soft_cap=cap)
    tensors = make_attention(case, CPU)
    out, lse = machine.attend(tensors, 2)
    starts = tensors.batch.row_start
    for row in range(len(rows)):
        own = slice(int(starts[row]), int(starts[row + 1]))
        for size in (1, 7, 64, 1000):
            parts = [machine.attend(piece) for piece in pieces(tensors, row, size)]
            found = tuple(torch.cat(part) for part in zip(*parts, strict=True))
            assert_same((found[0], found[1]), (out[own], lse[own]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 700])
def test_sharing_changes_no_bit(machine: Machine, dtype: torch.dtype, window: int | None) -> None:
    """Runs within runs, ended anywhere in key blocks and segments, of rows that decode and rows
    that extend a little or much."""
    rows = (
        *((1, 1500), (1, 1402), (4, 1500), (1, 1300), (1, 1212), (60, 1300)),
        *((1, 2500), (2, 2400), (1, 2200), (1, 400), (1, 391), (1, 380)),
    )
    shared = ((0, 9, 640), (0, 6, 1180), (0, 3, 1396), (6, 9, 2112), (6, 8, 2300), (9, 12, 376))
    shapes = (((6, 2), 16, 4), ((4, 4), 8, 1), ((4, 1), 20, 2), ((6, 2), 32, 16))
    taken = {None: shapes, 5: shapes[:1], 700: shapes[1::2]}[window]
    for heads, dim, block_size in taken:
        whole = tuple(
            (begin, end, count // block_size * block_size) for begin, end, count in shared
        )
        case = AttentionCase(rows, block_size, heads, dim, dtype, window=window, shared=whole)
        tensors = make_attention(case, CPU)
        plain = machine.attend(tensors)
        assert_right(tensors, plain)
        for runs, teams in (
            (all_runs(tensors), THREADS),
            (all_runs(tensors, 1200 // block_size), (2,)),
            (all_runs(tensors)[:1], (5,)),
        ):
            assert runs
            for threads in teams:
                assert_same(machine.attend(tensors, threads, runs), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_is_cut_for_many_threads(machine: Machine, dtype: torch.dtype) -> None:
    for rows in (((1, 9000),), ((1, 5000), (20, 4100))):
        tensors = make_attention(AttentionCase(rows, 16, (4, 1), 16, dtype), CPU)
        found = machine.attend(tensors)
        assert_right(tensors, found)
        for threads in THREADS[1:]:
            assert_same(machine.attend(tensors, threads), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_lie_apart(machine: Machine, dtype: torch.dtype) -> None:
    """Queries lie as in the output of a product for queries, keys and values."""
    tensors = make_attention(AttentionCase(MIX, 16, (4, 2), 32, dtype), CPU)
    wide = torch.full((len(tensors.q), 8, 32), float("nan"), dtype=dtype)
    wide[:, :4] = tensors.q
    apart = replace(tensors, q=wide[:, :4])
    assert_same(machine.attend(apart), machine.attend(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_computed_one_after_another(machine: Machine, dtype: torch.dtype) -> None:
    tensors = make_attention(AttentionCase(MIX, 16, (4, 2), 16, dtype), CPU)
    junk = torch.randn((2, *tensors.k_cache.shape)).to(dtype)
    laid = laid_out(tensors.k_cache, tensors.v_cache)
    stacked = torch.stack([junk[0], junk[1], *laid]).unflatten(0, (2, 2))
    out = attend(
        machine.library, machine.teams[2], tensors.q, stacked[:, 0], stacked[:, 1], tensors.batch
    )
    assert torch.equal(out, machine.attend(tensors)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size(machine: Machine, dtype: torch.dtype) -> None:
    """A later key outweighs all before it, and weights are too small for a float32."""
    rows = ((1, 1300), (40, 150))
    for scale, cap in ((1e-6, 0.0), (0.3, 0.0), (40.0, 0.0), (0.3, 5.0), (40.0, 30.0)):
        case = AttentionCase(rows, 16, (4, 2), 16, dtype, scale=scale, soft_cap=cap)
        tensors = make_attention(case, CPU)
        growing = torch.linspace(-2, 2, tensors.k_cache.numel()).view(tensors.k_cache.shape)
        tensors = replace(tensors, k_cache=(tensors.k_cache * growing).to(dtype))
        out, lse = machine.attend(tensors)
        expected, expected_lse = exact_attention(tensors)
        assert relative_error(out, expected) < 10 * TOLERANCE[dtype]
        limit = 1e-5 * float(expected_lse.abs().max()) + LSE_TOLERANCE[dtype]
        assert float((lse - expected_lse).abs().max()) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_not_a_number_stays_where_it_is_seen(
    machine: Machine, cap: float, dtype: torch.dtype
) -> None:
    rows = ((1, 1090), (80, 100))
    tensors = make_attention(AttentionCase(rows, 16, (4, 2), 16, dtype, soft_cap=cap), CPU)
    clean, _ = machine.attend(tensors)
    q, k, v = tensors.q.clone(), tensors.k_cache.clone(), tensors.v_cache.clone()
    q[3, 1, 0] = float("nan")
    table = tensors.batch.block_tables[0]
    k[table[67], 8, 1, 0] = float("nan")  # row 0, position 1080, key head 1: heads 2 and 3
    out, lse = machine.attend(replace(tensors, q=q, k_cache=k))
    bad = torch.zeros(out.shape[:2], dtype=torch.bool)
    bad[3, 1] = True
    bad[0, 2:] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(lse.isnan(), bad)
    assert torch.equal(out[~bad], clean[~bad])
    v[table[67], 8, 0, 2] = float("nan")
    out, _ = machine.attend(replace(tensors, v_cache=v))
    assert bool(out[0, :2, 2].isnan().all()) and int(out.isnan().sum()) == 2
    k = tensors.k_cache.clone()
    k[table[:64], :, 0] = float("nan")  # a whole segment
    out, lse = machine.attend(replace(tensors, k_cache=k))
    bad = torch.zeros(out.shape[:2], dtype=torch.bool)
    bad[0, :2] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(lse.isnan(), bad)


def test_empty_rows_and_steps(machine: Machine) -> None:
    tensors = make_attention(AttentionCase(((1, 90), (80, 100))), CPU)
    out, lse = machine.attend(tensors)
    batch = tensors.batch
    padded = replace(
        batch,
        row_start=np.array([0, 0, 1, 1, 81], np.int32),
        context_len=np.array([0, 90, 0, 100], np.int32),
        block_tables=batch.block_tables[[0, 0, 1, 1]],
    )
    assert_same(machine.attend(replace(tensors, batch=padded), 2), (out, lse))
    nothing = replace(
        batch,
        row_start=np.zeros(1, np.int32),
        context_len=np.zeros(0, np.int32),
        block_tables=batch.block_tables[:0],
    )
    assert len(machine.attend(replace(tensors, batch=nothing, q=tensors.q[:0]), 2)[0]) == 0


def test_what_does_not_fit_is_refused(machine: Machine) -> None:
    tensors = make_attention(AttentionCase(((1, 9),)), CPU)
    q, k, v, batch = tensors.q, tensors.k_cache, tensors.v_cache, tensors.batch
    for queries, keys, values, options in (
        (q.double(), k, v, {}),
        (q.bfloat16(), k, v, {}),
        (q[:, :3], k, v, {}),
        (q[:, :, :15], k[..., :15], v[..., :15], {}),
        (q, k[:, :8], v[:, :8], {}),
        (q, k, v[:1], {}),
        (q.repeat(2, 1, 1), k, v, {}),
        (q, k, v, {"out": torch.empty(1, 4, 8)}),
        (q, k, v, {"lse": torch.empty(1, 4, dtype=torch.float64)}),
        (q, k, v, {"scale": 0.0}),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            attend(machine.library, machine.teams[1], queries, keys, values, batch, **options)


def test_the_tile_unit_computes_what_its_twin_does() -> None:
    unit, twin = (Machine(one) for one in with_tile_unit())
    for heads, dim, block_size in (((4, 2), 64, 16), ((4, 1), 80, 64), ((7, 1), 6, 16)):
        tensors = make_attention(AttentionCase(MIX, block_size, heads, dim, torch.bfloat16), CPU)
        assert_same(unit.attend(tensors), twin.attend(tensors))
