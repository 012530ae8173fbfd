"""Attention of real shapes against float64: every feature with every mix of rows.

Caches are NaN where nothing may be read, memory that kernels write to is NaN beforehand.
"""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import KernelSet
from tests.kernels.cases import (
    FP8,
    INTEGERS,
    AttentionCase,
    AttentionTensors,
    exact_attention,
    make_attention,
    poisoned_memory,
    relative_error,
)

BF16 = torch.bfloat16
INT8, INT4 = INTEGERS
TOLERANCE = {torch.float32: 1e-5, BF16: 1e-2}
LSE_TOLERANCE = {torch.float32: 1e-4, BF16: 3e-2}

# (new tokens, context) per row, and what rows have in common.
Mix = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]
MIXES: dict[str, Mix] = {
    "decode": (((1, 1), (1, 17), (1, 300), (1, 5000), (1, 4096), (1, 129), (1, 16000)), ()),
    "long decode row": (((1, 40000),), ()),
    "prefill": (((2500, 2500),), ()),
    "extend": (((700, 3000), (3, 2000), (17, 17), (250, 9000)), ()),
    "mixed": (((1, 900), (600, 600), (1, 7000), (64, 2048), (1, 1), (2, 31), (1, 2049)), ()),
    "tree": (
        (*((1, 6200 + 7 * i) for i in range(20)), (1, 3000), (40, 2500)),
        # All under 2k, the first twelve under 4k, of them five under 6144.
        ((0, 20, 2048), (0, 12, 4096), (3, 8, 6144)),
    ),
    "wide tree": ((*((1, 8192 + 1 + i) for i in range(64)),), ((0, 64, 8192),)),
}
SMALL_MIXES: dict[str, Mix] = {
    "decode": (((1, 1), (1, 17), (1, 30), (1, 50)), ()),
    "long decode row": (((1, 400),), ()),
    "prefill": (((40, 40),), ()),
    "extend": (((7, 30), (3, 20), (17, 17)), ()),
    "mixed": (((1, 9), (6, 6), (1, 70), (2, 31)), ()),
    "tree": ((*((1, 230 + i) for i in range(6)), (4, 40)), ((0, 6, 64), (1, 4, 128))),
    "wide tree": ((*((1, 257 + i) for i in range(8)),), ((0, 8, 256),)),
}

FEATURES: dict[str, dict[str, Any]] = {
    "8B": {},
    "8B float32": {"dtype": torch.float32},
    "8B fp8": {"kv_dtype": FP8},
    "1B": {"head_dim": 64},
    "group of 7": {"heads": (28, 4)},
    "no groups": {"heads": (8, 8), "head_dim": 96},
    "one key head": {"heads": (8, 1), "head_dim": 256},
    "odd size": {"heads": (16, 4), "head_dim": 80},
    "window": {"window": 1000},
    "narrow window": {"window": 16},
    "soft cap": {"soft_cap": 30.0},
    "scale": {"scale": 0.04},
    "blocks of 64": {"block_size": 64},
    "fp8, window, cap": {"kv_dtype": FP8, "window": 700, "soft_cap": 20.0, "head_dim": 64},
    "8B int8": {"kv_dtype": INT8},
    "8B int4": {"kv_dtype": INT4},
    "int4 float32": {"kv_dtype": INT4, "dtype": torch.float32, "heads": (16, 4), "head_dim": 80},
    "int4, window, cap": {"kv_dtype": INT4, "window": 700, "soft_cap": 20.0, "head_dim": 64},
}
SMALL = {"heads": (4, 2), "head_dim": 16}


def case_of(mix: str, feature: str, real: bool) -> AttentionCase:
    rows, shared = (MIXES if real else SMALL_MIXES)[mix]
    options = {"dtype": BF16, "heads": (32, 8), "head_dim": 128, **FEATURES[feature]}
    if not real:
        options |= SMALL
        options["window"] = options.get("window") and min(options["window"], 20)
    return AttentionCase(rows=rows, shared=shared, **options)


def attend(
    kernels: KernelSet, tensors: AttentionTensors, rows: int | None = None, want_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    plan = kernels.plan_attention(tensors.batch, tensors.case.window, rows)
    device = tensors.q.device
    bound = plan.bind([torch.from_numpy(array).to(device) for array in plan.arrays])
    with torch.inference_mode(), poisoned_memory():
        return kernels.paged_attention(
            tensors.q,
            tensors.k_cache,
            tensors.v_cache,
            bound,
            want_lse=want_lse,
            **tensors.options(),  # type: ignore[arg-type]
        )


def check(tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    exact, exact_lse = exact_attention(tensors)
    tolerance = TOLERANCE[tensors.case.dtype]
    assert out.dtype == tensors.q.dtype and out.shape == tensors.q.shape
    assert relative_error(out, exact) < tolerance
    # No token is bad while the others are good.
    worst = ((out.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max()
    assert worst < 5 * tolerance
    assert lse is not None and lse.dtype == torch.float32
    assert float((lse.double() - exact_lse).abs().max()) < LSE_TOLERANCE[tensors.case.dtype]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("feature", FEATURES)
def test_attention(
    kernels: KernelSet, device: torch.device, real: bool, feature: str, mix: str
) -> None:
    tensors = make_attention(case_of(mix, feature, real), device)
    out, lse = attend(kernels, tensors)
    check(tensors, out, lse)
    alone, nothing = attend(kernels, tensors, want_lse=False)
    assert nothing is None
    if real:
        assert torch.equal(alone, out)  # twice the same, with lse and without


def test_a_tree_is_shared(kernels: KernelSet, device: torch.device, real: bool) -> None:
    """The mixes called trees are planned as trees: else they would test nothing."""
    if not real:
        pytest.skip("what is worth sharing is another question on a CPU")
    for mix in ("tree", "wide tree"):
        batch = make_attention(case_of(mix, "8B", real), device).batch
        plan: Any = kernels.plan_attention(batch, None)
        assert plan.decode.shares


@pytest.mark.parametrize(
    "feature",
    ["8B", "8B float32", "8B fp8", "1B", "window", "8B int4", "8B int8", "odd size"],
)
def test_a_decode_row_does_not_depend_on_its_company(
    kernels: KernelSet, device: torch.device, real: bool, feature: str
) -> None:
    """Bit for bit: alone, in a batch, in the batch reversed, in a graph's family."""
    tensors = make_attention(case_of("decode", feature, real), device)
    out, lse = attend(kernels, tensors)
    count = len(tensors.batch.context_len)
    for row in range(count):
        alone, alone_lse = attend(kernels, tensors.alone(row))
        assert lse is not None and alone_lse is not None
        same(alone[0], out[row], real)
        same(alone_lse[0], lse[row], real)
    batch = replace(
        tensors.batch,
        context_len=np.ascontiguousarray(tensors.batch.context_len[::-1]),
        block_tables=np.ascontiguousarray(tensors.batch.block_tables[::-1]),
    )
    reversed_out, _ = attend(kernels, replace(tensors, batch=batch, q=tensors.q.flip(0)))
    same(reversed_out.flip(0), out, real)
    if real:
        padded = replace(tensors, q=torch.cat((tensors.q, tensors.q[:1].repeat(5, 1, 1))))
        family, _ = attend(kernels, padded, rows=count + 5)
        same(family[:count], out, real)


def same(one: torch.Tensor, other: torch.Tensor, exactly: bool) -> None:
    """The reference kernels pad rows to each other's length; only ours promise the last bit."""
    if exactly:
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("feature", ["8B", "8B fp8", "8B int8", "8B int4", "1B", "window"])
def test_a_captured_graph_serves_any_contexts(
    kernels: KernelSet, device: torch.device, real: bool, feature: str
) -> None:
    """One capture, replayed with other rows, lengths and blocks; also with fewer rows."""
    if not real:
        pytest.skip("graphs are captured on a GPU only")
    rows = 8
    options = {"dtype": BF16, "heads": (32, 8), "head_dim": 128, **FEATURES[feature]}
    mixes: list[Mix] = [
        (tuple((1, 100 + 37 * i) for i in range(rows)), ()),
        (tuple((1, 9000 + i) for i in range(rows)), ((0, rows, 8192),)),
        (((1, 1), (1, 30000), (1, 12)), ()),
    ]
    made = [make_attention(AttentionCase(r, shared=s, **options), device) for r, s in mixes]
    blocks = max(len(tensors.k_cache) for tensors in made)
    shape = (blocks, *made[0].k_cache.shape[1:])
    k_cache, v_cache = (
        torch.zeros(shape, dtype=BF16, device=device).to(made[0].k_cache.dtype) for _ in range(2)
    )
    q = torch.zeros(rows, *made[0].q.shape[1:], dtype=BF16, device=device)
    plans = [kernels.plan_attention(t.batch, t.case.window, rows) for t in made]
    places = [
        torch.zeros(1 << 18, dtype=torch.int32, device=device)
        if array is plans[0].arrays[-1]
        else torch.zeros(array.shape, dtype=torch.int32, device=device)
        for array in plans[0].arrays
    ]
    scales = made[0].scales  # the same of all: made from the same seed

    def load(index: int) -> None:
        tensors = made[index]
        for cache, source in ((k_cache, tensors.k_cache), (v_cache, tensors.v_cache)):
            cache[: len(source)].view(torch.uint8).copy_(source.view(torch.uint8))
        q.zero_()
        q[: len(tensors.q)] = tensors.q
        for place, array in zip(places, plans[index].arrays, strict=True):
            place.view(-1)[: array.size].copy_(torch.from_numpy(array).view(-1))

    def work() -> torch.Tensor:
        return kernels.paged_attention(q, k_cache, v_cache, bound, scales=scales)[0]

    with torch.inference_mode():
        load(0)
        bound = plans[0].bind(places)
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = work()
        for index, tensors in [(1, made[1]), (2, made[2]), (0, made[0]), (1, made[1])]:
            load(index)
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            found = out[: len(tensors.q)].clone()
            eager, lse = attend(kernels, tensors)
            check(tensors, found, lse)
            if not tensors.case.shared:
                assert torch.equal(found, eager)
            assert not out[len(tensors.q) :].any()  # empty rows are zeros


def test_levels_merge_by_log_sum_exp(kernels: KernelSet, device: torch.device, real: bool) -> None:
    """Attention over two halves of a context, merged, is attention over the whole."""
    half = 2048 if real else 32
    tensors = make_attention(
        AttentionCase(
            ((1, 2 * half),), dtype=torch.float32, heads=(8, 2), head_dim=64 if real else 16
        ),
        device,
    )
    whole, _ = attend(kernels, tensors)
    blocks = half // tensors.batch.block_size
    outs, sums = [], []
    for part in (slice(0, blocks), slice(blocks, 2 * blocks)):
        batch = replace(
            tensors.batch,
            context_len=np.array([half], np.int32),
            block_tables=np.ascontiguousarray(tensors.batch.block_tables[:, part]),
        )
        out, lse = attend(kernels, replace(tensors, batch=batch))
        assert lse is not None
        outs.append(out)
        sums.append(lse)
    weights = torch.softmax(torch.stack(sums), 0).unsqueeze(-1)
    merged = (torch.stack(outs) * weights).sum(0)
    torch.testing.assert_close(merged, whole, atol=2e-6, rtol=1e-5)
