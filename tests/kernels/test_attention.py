"""Paged attention against a float64 loop over rows, heads and tokens."""

import itertools

import msgspec
import numpy as np
import pytest
import torch

from rootlace.kernels.dispatch import kernels_for
from rootlace.kernels.interface import AttentionBatch, KernelSet
from rootlace.kernels.reference import attention
from rootlace.kernels.shared_runs import SharedRun, chosen_runs, whole_blocks

CPU = torch.device("cpu")
KERNELS: KernelSet = kernels_for(CPU)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

# (new tokens, context) per row.
MIXES = {
    "decode": [(1, 1), (1, 30), (1, 17), (1, 30), (1, 5)],
    "prefill": [(19, 19)],
    "extend": [(3, 20), (7, 7), (2, 40)],
    "mixed": [(1, 9), (5, 12), (1, 33), (16, 16), (1, 1), (2, 9), (4, 21), (1, 12)],
}


def exact(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, batch: AttentionBatch, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """k, v: [slots, Nk, D]; everything float64 -> out [T, Nq, D], lse [T, Nq]."""
    out, lse = np.zeros_like(q), np.zeros(q.shape[:2])
    group = batch.num_heads // batch.num_kv_heads
    size = batch.block_size
    for row in range(len(batch.context_len)):
        start, stop = batch.row_start[row], batch.row_start[row + 1]
        for token in range(start, stop):
            position = batch.context_len[row] - (stop - token)
            low = 0 if window is None else max(0, position - window + 1)
            places = range(low, position + 1)
            slots = [batch.block_tables[row, p // size] * size + p % size for p in places]
            for head in range(batch.num_heads):
                scores = k[slots, head // group] @ q[token, head] / np.sqrt(batch.head_dim)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v[slots, head // group] / weights.sum()
                lse[token, head] = scores.max() + np.log(weights.sum())
    return out, lse


def make_batch(
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make random queries and a cache whose unused slots are NaN."""
    generator = np.random.default_rng(1)
    needed = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(needed) + 3
    free = generator.permutation(num_blocks)
    tables = np.full((len(rows), max(needed) + 1), -7, dtype=np.int32)
    cache = torch.full((2, num_blocks, block_size, heads[1], dim), float("nan"), dtype=dtype)
    taken = 0
    for row, (_, context) in enumerate(rows):
        tables[row, : needed[row]] = free[taken : taken + needed[row]]
        taken += needed[row]
        for p in range(context):
            values = torch.from_numpy(generator.normal(0, 1.5, (2, heads[1], dim)))
            cache[:, tables[row, p // block_size], p % block_size] = values.to(dtype)
    lengths = [length for length, _ in rows]
    q = torch.from_numpy(generator.normal(0, 1.5, (sum(lengths), heads[0], dim))).to(dtype)
    batch = AttentionBatch(
        row_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_len=np.array([context for _, context in rows], dtype=np.int32),
        block_tables=tables,
        block_size=block_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        dtype=dtype,
        device=CPU,
    )
    return batch, q, cache[0], cache[1]


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_attention_equals_the_formula(mix: str, window: int | None) -> None:
    grid = itertools.product(
        (1, 4, 16), ((4, 4), (6, 2), (4, 1)), (8, 24), (torch.float32, torch.bfloat16)
    )
    for block_size, heads, dim, dtype in grid:
        batch, q, k, v = make_batch(MIXES[mix], block_size, heads, dim, dtype)
        plan = KERNELS.plan_attention(batch, window)
        with torch.inference_mode():
            out, lse = KERNELS.paged_attention(q, k, v, plan, want_lse=True)
            alone, nothing = KERNELS.paged_attention(q, k, v, plan)
        assert nothing is None
        assert torch.equal(alone, out)
        assert out.shape == q.shape
        assert out.dtype == dtype
        wide = [
            t.double().numpy()
            for t in (q, k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]))
        ]
        expected, expected_lse = exact(*wide, batch, window)
        np.testing.assert_allclose(out.double(), expected, atol=TOLERANCE[dtype] * 4)
        assert lse is not None
        assert lse.dtype == torch.float32
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("window", [None, 3, 40])
def test_how_rows_are_grouped_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    rows = [(1, int(c)) for c in np.random.default_rng(0).integers(1, 60, 12)]
    rows += [(int(n), 60) for n in (2, 9, 33)]
    batch, q, k, v = make_batch(rows, 4, (4, 2), 16, torch.float32)
    wide = [t.double().numpy() for t in (q, k.reshape(-1, 2, 16), v.reshape(-1, 2, 16))]
    expected, _ = exact(*wide, batch, window)
    for chunk, gather, padding, small in itertools.product(
        (1, 8, 256), (1, 1 << 13, 1 << 20), (1.0, 1.25), (0, 1024)
    ):
        monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
        monkeypatch.setattr(attention, "GATHER_BYTES", gather)
        monkeypatch.setattr(attention, "PADDING", padding)
        monkeypatch.setattr(attention, "SMALL_GROUP", small)
        plan = KERNELS.plan_attention(batch, window)
        out, _ = KERNELS.paged_attention(q, k, v, plan)
        np.testing.assert_allclose(out.double(), expected, atol=1e-5)


def test_parts_of_a_context_merge_by_log_sum_exp() -> None:
    """Why the log-sum-exp is returned: attention over two halves gives attention over the whole."""
    batch, q, k, v = make_batch([(1, 32)], 16, (4, 2), 16, torch.float32)
    whole, _ = KERNELS.paged_attention(q, k, v, KERNELS.plan_attention(batch, None))
    parts = []
    for block in batch.block_tables[0, :2]:
        half = AttentionBatch(
            **{
                **msgspec.structs.asdict(batch),
                "block_tables": np.array([[block]]),
                "context_len": np.array([16], dtype=np.int32),
            }
        )
        parts.append(
            KERNELS.paged_attention(q, k, v, KERNELS.plan_attention(half, None), want_lse=True)
        )
    outs = torch.stack([out for out, _ in parts])
    sums = torch.stack([lse for _, lse in parts if lse is not None])
    merged = (outs * torch.softmax(sums, 0).unsqueeze(-1)).sum(0)
    torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-5)


def test_shared_runs_are_nested_as_the_tables_are() -> None:
    """Four rows share two blocks; of them the last two share another one."""
    tables = np.array([[5, 6, 1, 0], [5, 6, 2, 3], [5, 6, 7, 8], [5, 6, 7, 9], [4, 6, 7, 9]])
    context = np.array([11, 16, 16, 13, 16])
    every = np.ones(5, dtype=bool)

    def runs(
        rows: int, context: np.ndarray, decoding: np.ndarray, saved: int = 1
    ) -> list[SharedRun]:
        whole = whole_blocks(context[:rows], decoding[:rows], 4)

        def worth(run: SharedRun) -> bool:
            return (run.end - run.begin - 1) * (run.high - run.low) >= saved

        return chosen_runs(tables[:rows], whole, worth)

    outer, inner = SharedRun(0, 4, 0, 2), SharedRun(2, 4, 2, 3)
    for saved, expected in [(1, [outer, inner]), (2, [outer]), (7, [])]:
        assert runs(5, context, every, saved) == expected
    # A row's last token is never shared, and neither is a row that does not decode.
    assert runs(2, np.array([8, 8]), every) == [SharedRun(0, 2, 0, 1)]
    assert runs(3, context, np.array([1, 0, 1], bool)) == []
