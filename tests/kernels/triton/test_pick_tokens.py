"""Tokens picked by the kernels against a plain float64 loop, and against the reference."""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import Choice, PickRows
from rootlace.kernels.reference.sampling import pick_tokens as reference
from rootlace.kernels.reference.sampling import uniforms
from rootlace.kernels.triton.pick_tokens import Sizes, pick_tokens
from tests.kernels.cases import with_tensors

module = importlib.import_module("rootlace.kernels.triton.pick_tokens")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_TOKEN = -1
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small vocabularies have several."""
    sized(monkeypatch, 256, 512)


def sized(monkeypatch: pytest.MonkeyPatch, tile: int, candidates: int) -> None:
    monkeypatch.setattr(module, "sizes", lambda arch: Sizes(tile, candidates, 4))


def rows_of(params: list[tuple[float, int, float, float]], seed: int = 0) -> PickRows:
    temperature, top_k, top_p, min_p = zip(*params, strict=True)
    random = np.random.default_rng(seed)
    count = len(params)
    return PickRows(
        params={
            "temperature": torch.tensor(temperature, dtype=torch.float64),
            "top_k": torch.tensor(top_k, dtype=torch.int32),
            "top_p": torch.tensor(top_p, dtype=torch.float64),
            "min_p": torch.tensor(min_p, dtype=torch.float64),
        },
        seed=torch.from_numpy(random.integers(-(2**63), 2**63 - 1, count)),
        position=torch.from_numpy(random.integers(0, 2**20, count)),
    )


def part(rows: PickRows, index: list[int]) -> PickRows:
    there = with_tensors(replace(rows, mask_table=None), lambda tensor: tensor[index])
    return replace(there, mask_table=rows.mask_table)


def masked(rows: PickRows, table: torch.Tensor, mask_row: list[int]) -> PickRows:
    return replace(rows, mask_table=table, mask_row=torch.tensor(mask_row, dtype=torch.int32))


def picked(logits: torch.Tensor, rows: PickRows, choice: Choice) -> list[int]:
    """Pick tokens by the kernels, and check that their input is unchanged."""
    there = with_tensors(rows, lambda tensor: tensor.to(DEVICE))
    moved = logits.to(DEVICE)
    kept = moved.clone()
    out = torch.full((len(logits) + 1,), 77, dtype=torch.int32, device=DEVICE)
    found = pick_tokens(moved, there, choice, out[:-1])
    assert not len(logits) or found.data_ptr() == out.data_ptr()
    assert out[-1] == 77
    assert torch.equal(moved.nan_to_num(), kept.nan_to_num())
    return found.tolist()


def plain(x: list[float], temperature: float, k: int, p: float, m: float, u: float) -> set[int]:
    """Return the possible tokens: several only if rounding decides."""
    top = max(x)
    if not math.isfinite(top) or any(math.isnan(value) for value in x):
        return {NO_TOKEN}
    ranking = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if temperature == 0:
        return {ranking[0]}
    weights = [math.exp((value - top) / temperature) for value in x]
    kept = ranking[:k]
    mass = math.fsum(weights[token] for token in kept)
    nucleus, before, close = [], 0.0, False
    for token in kept:
        if before < p * mass or p == 1.0:
            nucleus.append(token)
        close |= p < 1 and abs(before - p * mass) < 1e-12 * mass
        before += weights[token]
    final = sorted(token for token in nucleus if weights[token] >= m)
    total = math.fsum(weights[token] for token in final)
    found, below = set(), 0.0
    for token in final:
        upto = below + weights[token]
        if below - 1e-12 * total <= u * total < upto + 1e-12 * total and weights[token] > 0:
            found.add(token)
        below = upto
    return found | (set(final) if close else set())


def check(logits: torch.Tensor, rows: PickRows, choice: Choice = "cut") -> list[int]:
    tokens = picked(logits, rows, choice)
    values = logits.double()
    if rows.mask_row is not None:
        assert rows.mask_table is not None
        ids = torch.arange(logits.shape[1])
        for row, mask in enumerate(rows.mask_row.tolist()):
            if mask >= 0:
                words = rows.mask_table[mask]
                there = ids // 32 < len(words)
                word = words[(ids // 32).clamp(max=len(words) - 1)]
                values[row, ~(there & ((word >> (ids % 32)) & 1).bool())] = -math.inf
    us = uniforms(rows.seed, rows.position).tolist()
    for row, token in enumerate(tokens):
        names = ("temperature", "top_k", "top_p", "min_p")
        params = [rows.params[name][row].item() for name in names]
        allowed = plain(values[row].tolist(), *params, us[row])  # type: ignore[arg-type]
        assert token in allowed, (row, params, token, allowed)
    assert tokens == reference(logits, rows, choice).tolist()
    return tokens


def normal(count: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# Each value of a parameter beside each of every other.
VALUES = ((0.0, 0.4, 2.5), (1, 40, 1000), (0.2, 0.9, 1.0))
GRID = [
    (VALUES[0][t], VALUES[1][k], VALUES[2][-(t + k) % 3], m)
    for t, k, m in itertools.product(range(3), range(3), (0.0, 0.05))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combinations(dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal. Each dtype takes half of the combinations."""
    params = GRID[dtype == torch.bfloat16 :: 2]
    check(normal(len(params), 600).to(dtype), rows_of(params))


@pytest.mark.parametrize("vocab", [1, 31, 255, 256, 257, 1000])
def test_vocabularies(vocab: int) -> None:
    params = [
        (t, min(k, vocab), p, m)
        for t, k, p, m in [
            (0.0, vocab, 1.0, 0.0),
            (1.0, vocab, 1.0, 0.0),
            (1.0, 20, 1.0, 0.0),
            (0.8, vocab, 0.9, 0.0),
            (3.0, 500, 0.95, 0.02),
            (1.0, vocab, 1.0, 0.3),
        ]
    ]
    check(normal(6, vocab, vocab), rows_of(params))


def test_ties_beyond_the_candidates() -> None:
    """With more equal tokens than held candidates, ids decide, over the whole row."""
    vocab = 700
    logits = torch.zeros(5, vocab)
    logits[1] = normal(1, vocab)[0].sign()
    logits[2, ::3] = 1.0
    logits[3, 650] = 2.0
    params = [
        (1.0, 333, 1.0, 0.0),
        (1.0, vocab, 0.7, 0.0),
        (1.0, vocab, 0.9, 0.0),
        (1.0, 600, 0.5, 0.1),
        (0.1, 699, 1.0, 0.0),
    ]
    check(logits, rows_of(params))


@pytest.mark.parametrize("candidates", [128, 1024])
def test_the_number_of_candidates_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, candidates: int
) -> None:
    """Whether the row's cut is found among candidates or by a search of the row."""
    sized(monkeypatch, 256, candidates)
    params = [(1.0, 300, 1.0, 0.0), (1.0, 300, 0.9, 0.0), (1.0, 500, 0.99, 0.0)]
    check(normal(len(params), 500, seed=5, scale=0.7), rows_of(params))


def test_logits_far_apart() -> None:
    """Outliers make the ladders coarse; extreme temperatures leave one weight, or none below 1."""
    logits = normal(8, 300)
    logits[0, 3] = -1e30
    logits[1, 5] = 1e5
    logits[2, :290] = float("-inf")
    logits[3, 1:] = float("-inf")
    logits[4] *= 1e-30
    logits[5, 7] = 3e38
    params = [(1.0, 50, 1.0, 0.0), (1.0, 300, 0.9, 0.0), (1.0, 60, 0.8, 0.0), (1.0, 9, 0.9, 0.0)]
    params += [(1.0, 300, 0.5, 0.0), (2.0, 300, 0.7, 0.0)]
    params += [(1e-300, 300, 0.9, 0.0), (1e6, 300, 0.9, 0.0)]
    check(logits, rows_of(params))


def test_rows_without_a_distribution() -> None:
    logits = normal(8, 300)
    logits[0] = float("-inf")
    logits[1, 299] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("nan")
    logits[4] = float("-inf")
    logits[5, 0] = -float("nan")
    params = [(t, 300, p, 0.0) for t, p in [(0, 1.0), (1, 1.0), (1, 0.5), (0, 1.0)] * 2]
    found = check(logits, rows_of(params))
    assert found[:6] == [NO_TOKEN] * 6 and min(found[6:]) >= 0


def test_masks() -> None:
    """Masks are shorter than the vocabulary, absent, repeated, or allow nothing."""
    table = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, (5, 12)))
    table = table.to(torch.int32)
    table[3] = 0
    table[4] = -1
    params = [(0.0, 500, 1.0, 0.0), (1.0, 500, 1.0, 0.0), (1.0, 30, 1.0, 0.0), (1.0, 500, 0.8, 0.1)]
    rows = masked(rows_of(params * 3), table, [0, 1, 2, 0, 3, 3, -1, 3, 4, 4, 1, -1])
    for choice, chosen in (("cut", range(12)), ("random", (0, 1, 4, 5)), ("greedy", (0, 4, 8))):
        index = list(chosen)
        check(normal(12, 500)[index], part(rows, index), choice)  # type: ignore[arg-type]


def test_nothing_depends_on_the_batch_or_on_the_launches() -> None:
    """A row gives one token alone, among others, and with kernels that other rows need."""
    params = [*GRID[::2], (2.5, 1000, 1.0, 0.0)]
    rows = rows_of(params)
    logits = normal(len(params), 300, seed=3).bfloat16()
    whole = picked(logits, rows, "cut")
    random = np.random.default_rng(0)
    for size in (1, 1, 3):
        index = random.permutation(len(params))[:size].tolist()
        assert picked(logits[index], part(rows, index), "cut") == [whole[i] for i in index]
    uncut = [i for i, (t, k, p, m) in enumerate(params) if (k, p, m) == (1000, 1.0, 0.0) or not t]
    assert uncut
    assert picked(logits[uncut], part(rows, uncut), "random") == [whole[i] for i in uncut]
    greedy = [i for i, row in enumerate(params) if not row[0]]
    assert picked(logits[greedy], part(rows, greedy), "greedy") == [whole[i] for i in greedy]


def test_strided_logits_and_empty_batches() -> None:
    rows = rows_of([(1.0, 20, 0.9, 0.0)] * 2)
    wide = normal(2, 500)
    expected = reference(wide[:, :300], rows, "cut").tolist()
    assert picked(wide[:, :300], rows, "cut") == expected
    turned = wide[:, :300].t().contiguous().t()
    assert picked(turned, rows, "cut") == expected
    assert picked(wide[:0], part(rows, []), "cut") == []


def test_the_sizes_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert module.sizes(90).tile >= 1024
    params = [(1.0, 9000, 1.0, 0.0), (0.7, 9000, 0.95, 0.0), (1.0, 50, 0.9, 0.0)]
    check(normal(3, 9000), rows_of(params))


def test_every_token_gets_its_share() -> None:
    """Exact, not statistical: uniform numbers of many positions hit each token as often as they
    fall into its part of the interval."""
    count = 60
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf, 1.5]]).expand(count, 5)
    rows = rows_of([(1.0, 5, 1.0, 0.0)] * count)
    borders = torch.softmax(logits[0].double(), 0).cumsum(0)
    expected = torch.searchsorted(borders, uniforms(rows.seed, rows.position), right=True)
    assert picked(logits, rows, "random") == expected.tolist()


def test_logits_whose_difference_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside masked tokens: levels between such logits are finite, so are weights that are 1."""
    sized(monkeypatch, 64, 64)
    random = np.random.default_rng(7)
    logits = torch.from_numpy(random.choice([3e38, -3e38, 0.0, 1.0], (8, 150)).astype(np.float32))
    table = torch.from_numpy(random.integers(-(2**31), 2**31, (2, 10)).astype(np.int32))
    cuts = [(150, 0.9, 0.0), (7, 1.0, 0.0), (40, 0.5, 0.1), (150, 0.3, 0.0)]
    # Two cuts at each temperature, and each cut at two temperatures.
    temperatures = enumerate((1e-3, 1.0, 1e38, 1e308))
    params = [(t, *cuts[(i + j) % 4]) for i, t in temperatures for j in (0, 1)]
    check(logits, masked(rows_of(params), table, [0, 1, 1, -1, 1, 0, -1, 0]))
