"""The sampler against a plain float64 loop per row, and its promises about batches and seeds."""

import importlib
import itertools
import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch

from rootlace.kernels.interface import HostSampling, LogitEdits
from rootlace.kernels.reference.sampling import NO_TOKEN, uniforms
from rootlace.runtime.contracts.plan import MaskRow, SampleRow
from rootlace.runtime.model.automaton_table import HostMasks
from rootlace.runtime.model.executor.torch_setup import host_sampling
from rootlace.runtime.model.sampler import Sampler
from rootlace.wire.protocol import SamplingParams
from tests.native import native_host_sampling

pick_tokens = importlib.import_module("rootlace.kernels.reference.sampling")

VOCAB = 403


def make_row(
    params: SamplingParams,
    token_ids: list[int] | None = None,
    prompt_len: int = 2,
    mask: np.ndarray | None = None,
    banned: tuple[int, ...] = (),
) -> SampleRow:
    ids = np.array(token_ids or [1, 2, 3], dtype=np.int32)
    return SampleRow(0, params, ids, prompt_len, mask, banned)


def make_logits(rows: int, seed: int = 0, ties: bool = False) -> torch.Tensor:
    logits = np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)
    if ties:  # as logits computed in bfloat16 are
        logits = np.round(logits * 2) / 2
    return torch.from_numpy(logits)


KERNELS: HostSampling = host_sampling()


@pytest.fixture(autouse=True, params=["reference", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the kernels of `sample`."""
    if request.param == "native":
        monkeypatch.setattr(f"{__name__}.KERNELS", native_host_sampling())


def sample(logits: torch.Tensor, rows: list[SampleRow], vocab: int = VOCAB) -> list[int]:
    return Sampler(vocab, KERNELS, HostMasks(vocab)).sample(logits.numpy(), rows).tolist()


def uniform(row: SampleRow) -> float:
    """Return the random number of a row's token."""
    seed, position = torch.tensor([row.params.seed or 0]), torch.tensor([len(row.token_ids)])
    return float(uniforms(seed, position))


def edited(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Return the logits after all edits of the rows, including mask and bans."""
    plan = Sampler(VOCAB, KERNELS, HostMasks(VOCAB)).plan(rows, len(rows))
    arrays = plan.arrays
    names = {*LogitEdits.__struct_fields__} & arrays.keys()
    penalties = {name: array for name, array in arrays.items() if name.endswith("_penalty")}
    edits = {name: arrays[name] for name in names}
    edit = LogitEdits(penalties=penalties, **edits)
    return torch.from_numpy(KERNELS.edit_logits(logits.numpy(), edit))


# ---------------------------------------------------------------- the reference


def reference_logits(logits: np.ndarray, row: SampleRow) -> list[float]:
    params = row.params
    x = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in row.banned:
        x[token] = -math.inf
    if row.mask is not None:
        for token in range(len(x)):
            word = int(row.mask[token // 32]) if token // 32 < len(row.mask) else 0
            if not (word >> (token % 32)) & 1:
                x[token] = -math.inf
    for token in {int(t) for t in row.token_ids}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token, count in Counter(int(t) for t in row.token_ids[row.prompt_len :]).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def reference_sample(logits: np.ndarray, row: SampleRow, u: float) -> tuple[int, float]:
    """(token, how far u is from the token's borders in the cumulative distribution)."""
    params = row.params
    x = reference_logits(logits, row)
    ranking = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        return ranking[0], x[ranking[0]] - x[ranking[1]]
    top = x[ranking[0]]
    weights = [math.exp((value - top) / params.temperature) for value in x]
    kept = ranking if params.top_k == -1 else ranking[: params.top_k]
    mass = math.fsum(weights[token] for token in kept)
    nucleus, before = [], 0.0
    for token in kept:
        if before < params.top_p * mass or params.top_p == 1.0:
            nucleus.append(token)
        before += weights[token]
    final = sorted(token for token in nucleus if weights[token] >= params.min_p)
    total = math.fsum(weights[token] for token in final)
    below = 0.0
    for token in final:
        upto = below + weights[token]
        if upto > u * total:
            return token, min(u - below / total, upto / total - u)
        below = upto
    raise AssertionError


GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=7)
    for t, k, p, m in itertools.product(
        (0.0, 0.3, 1.0, 2.5), (-1, 1, 2, 40, 300, 10**6), (0.05, 0.7, 0.999, 1.0), (0.0, 0.02, 1.0)
    )
]


@pytest.mark.parametrize("ties", [False, True])
def test_every_cut_equals_the_reference(ties: bool) -> None:
    """All combinations in one batch, five positions each."""
    rows, logits, us = [], [], []
    for index, params in enumerate(GRID):
        for position in range(5):
            ids = list(range(1, 4 + position))
            rows.append(make_row(params, ids))
            logits.append(make_logits(1, seed=index, ties=ties))
            us.append(uniform(rows[-1]))
    stacked = torch.cat(logits)
    found = sample(stacked, rows)
    for i, (row, token, u) in enumerate(zip(rows, found, us, strict=True)):
        expected, margin = reference_sample(stacked[i].numpy(), row, u)
        assert token == expected or margin < 1e-12, (row.params, token, expected)


def test_cuts_beyond_the_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat distribution needs more than the first candidates; where they end changes nothing."""
    logits = make_logits(1) * 0.05
    rows = [
        make_row(SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m, seed=s))
        for k, p, m, s in itertools.product((-1, 17, 200), (0.5, 1.0), (0.0, 0.8), range(8))
    ]
    stacked = logits.expand(len(rows), VOCAB)
    answers = []
    for first in (1, 16, 17, 18, 256, VOCAB):
        monkeypatch.setattr(pick_tokens, "FIRST_RANKED", first)
        answers.append(sample(stacked, rows))
    assert all(answer == answers[0] for answer in answers)
    for row, token in zip(rows, answers[0], strict=True):
        expected, margin = reference_sample(logits[0].numpy(), row, uniform(row))
        assert token == expected or margin < 1e-12


EDITS = {
    "bias": make_row(SamplingParams(temperature=0.0, logit_bias={5: 100.0, 6: -3.5})),
    "bias outside the vocabulary": make_row(
        SamplingParams(temperature=0.0, logit_bias={VOCAB: 100.0, 9: 50.0})
    ),
    "banned": make_row(SamplingParams(temperature=0.8, seed=3), banned=tuple(range(0, VOCAB, 2))),
    "repetition": make_row(
        SamplingParams(temperature=0.9, repetition_penalty=1.7, seed=1), [4, 4, 9, 7, 7, 7], 3
    ),
    "reward": make_row(
        SamplingParams(temperature=0.9, repetition_penalty=0.4, seed=1), [4, 4, 9, 7, 7, 7], 3
    ),
    "frequency": make_row(
        SamplingParams(temperature=0.9, frequency_penalty=1.3, seed=1), [4, 4, 9, 7, 7, 7], 3
    ),
    "presence": make_row(
        SamplingParams(temperature=0.9, presence_penalty=-2.0, seed=1), [4, 4, 9, 7, 7, 7], 3
    ),
    "everything": make_row(
        SamplingParams(
            temperature=0.7,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            logit_bias={7: 4.0, 8: 5.0},
            repetition_penalty=1.2,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            seed=11,
        ),
        [4, 4, 9, 7, 7, 7],
        3,
        mask=np.array([0x0F0F0F0F] * (VOCAB // 32 + 1), dtype=np.uint32).view(np.int32),
        banned=(8,),
    ),
    "short mask": make_row(
        SamplingParams(temperature=1.0, seed=5), mask=np.array([-1, -(2**31)], dtype=np.int32)
    ),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_edits_equal_their_formulas(name: str) -> None:
    row = EDITS[name]
    logits = make_logits(1, seed=4)
    before = logits.clone()
    if name != "bias outside the vocabulary":
        expected_logits = reference_logits(before[0].numpy(), row)
        assert expected_logits != before[0].tolist()
        np.testing.assert_allclose(edited(logits, [row])[0], expected_logits, rtol=1e-6)
        expected, margin = reference_sample(before[0].numpy(), row, uniform(row))
        assert sample(logits, [row])[0] == expected or margin < 1e-6
    else:
        assert sample(logits, [row]) == [9]
    assert torch.equal(logits, before), "the caller's logits are scored afterwards: untouched"


def test_all_edits_in_one_batch_are_those_of_single_rows() -> None:
    rows = [row for _, row in sorted(EDITS.items())]
    logits = make_logits(len(rows), seed=8)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert sample(logits, rows) == alone


def test_nothing_depends_on_the_batch() -> None:
    """Any subset, in any order, gives each row the same token."""
    rows = [make_row(params, [1, 2, 3, 4]) for params in GRID[::3]] + list(EDITS.values())
    logits = make_logits(len(rows), seed=2, ties=True)
    whole = sample(logits, rows)
    generator = np.random.default_rng(0)
    for size in (1, 2, 7, 31, len(rows)):
        chosen = generator.permutation(len(rows))[:size]
        part = sample(logits[torch.from_numpy(chosen)], [rows[i] for i in chosen])
        assert part == [whole[i] for i in chosen]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [300, 20, 31]] = 1.0
    greedy = make_row(SamplingParams(temperature=0.0))
    assert sample(logits, [greedy, greedy]) == [0, 20]
    top1 = make_row(SamplingParams(temperature=1.0, top_k=1, seed=9))
    assert sample(logits, [top1, top1]) == [0, 20]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    logits = make_logits(1)
    rows = [make_row(SamplingParams(temperature=temperature, seed=s)) for s in range(20)]
    found = sample(logits.expand(20, VOCAB), rows)
    if temperature < 1:
        assert set(found) == {int(logits.argmax())}
    else:
        assert len(set(found)) > 10


class Table:
    """A mask table of two rows, the second of which is not filled."""

    def __init__(self, words: np.ndarray, key: int) -> None:
        self.key = key
        self.rows = np.stack([words, words])

    def filled(self, row: int) -> bool:
        return row == 0


@pytest.mark.parametrize("seed", range(6))
def test_greedy_under_masks_and_bans(seed: int) -> None:
    """The best token is allowed in some rows, forbidden in others, and NaN in further ones."""
    generator = np.random.default_rng(seed)
    cold = SamplingParams(temperature=0.0)
    logits = make_logits(24, seed=seed, ties=True)
    rows = []
    for i in range(len(logits)):
        best = int(logits[i].argmax())
        bits = generator.random(VOCAB) < generator.choice([0.02, 0.5, 0.98])
        bits[best] = i % 2
        words = np.packbits(bits, bitorder="little")
        words = np.pad(words, (0, -len(words) % 4)).view(np.int32)
        words = words[: generator.choice([3, len(words)])]
        banned = tuple(generator.choice(VOCAB, 3).tolist()) + ((best,) if i % 3 == 0 else ())
        mask = MaskRow(Table(words, 2**41 + i), 0) if i % 4 < 2 else words
        rows.append(msgspec.structs.replace(make_row(cold, banned=banned), mask=mask))
        if i % 5 == 0:
            logits[i, int(generator.choice(np.flatnonzero(~bits)))] = float("nan")
    expected = []
    for row, values in zip(rows, logits, strict=True):
        words = row.mask.table.rows[0] if isinstance(row.mask, MaskRow) else row.mask
        plain = msgspec.structs.replace(row, mask=words)
        finite = np.where(np.isnan(values.numpy()), -np.inf, values.numpy())
        x = reference_logits(finite, plain)
        expected.append(x.index(max(x)) if max(x) > -math.inf else NO_TOKEN)
    assert sample(logits, rows) == expected
    hot = make_row(SamplingParams(temperature=1.0, seed=3))
    mixed = [hot if i % 3 == 1 else row for i, row in enumerate(rows)]
    found = sample(logits.nan_to_num(), mixed)
    alone = sample(logits.nan_to_num(), rows)
    assert [t for i, t in enumerate(found) if i % 3 != 1] == [
        t for i, t in enumerate(alone) if i % 3 != 1
    ]


def test_a_row_that_is_not_filled_is_not_read() -> None:
    words = np.full(VOCAB // 32 + 1, -1, np.int32)
    row = make_row(SamplingParams(temperature=0.0))
    with pytest.raises(RuntimeError, match="not filled"):
        sample(make_logits(1), [msgspec.structs.replace(row, mask=MaskRow(Table(words, 2**42), 1))])


def test_rows_with_nothing_to_sample() -> None:
    """Nothing allowed, or not a number: that row alone gets no token."""
    nothing = np.zeros(VOCAB // 32 + 1, dtype=np.int32)
    logits = make_logits(6)
    logits[2] = float("nan")
    logits[4, 17] = float("nan")
    hot, cut = (SamplingParams(temperature=1.0, seed=1, top_p=p) for p in (1.0, 0.5))
    rows = [make_row(hot), make_row(hot, mask=nothing), make_row(hot), make_row(hot)]
    rows += [make_row(cut), make_row(cut, mask=nothing)]
    found = sample(logits, rows)
    assert [found[i] for i in (1, 2, 4, 5)] == [NO_TOKEN] * 4
    assert found[0] >= 0
    assert found[3] >= 0
    cold = SamplingParams(temperature=0.0)
    found = sample(logits[:3], [make_row(cold), make_row(cold, mask=nothing), make_row(cold)])
    assert found[1:] == [NO_TOKEN] * 2
    assert found[0] == int(logits[0].argmax())


def test_one_allowed_token_is_taken_whatever_its_logit() -> None:
    mask = np.zeros(VOCAB // 32 + 1, dtype=np.int32)
    mask[3] = 1 << 5
    logits = make_logits(3)
    logits[:, 101] = -1e4
    params = [SamplingParams(temperature=t, top_p=p, seed=1) for t, p in ((0, 1), (1, 1), (1, 0.1))]
    assert sample(logits, [make_row(p, mask=mask) for p in params]) == [101] * 3


# ---------------------------------------------------------------- randomness


def splitmix64(state: int) -> int:
    """Return one output of the published generator, in Python integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_uniforms_are_splitmix64_streams() -> None:
    # The generator's published first outputs for state 1234567.
    assert splitmix64(1234567) == 6457827717110365317
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 42]
    for position in (0, 1, 77, 10**6):
        found = uniforms(torch.tensor(seeds), torch.tensor([position] * len(seeds))).tolist()
        for seed, u in zip(seeds, found, strict=True):
            start = splitmix64(seed % 2**64)
            bits = splitmix64((start + position * 0x9E3779B97F4A7C15) % 2**64)
            assert u == (bits >> 11) / 2**53
    assert len(set(found)) == len(seeds)


def test_seed_and_position_decide() -> None:
    logits = make_logits(1).expand(40, VOCAB)
    ids = [1, 2, 3]
    same = [make_row(SamplingParams(temperature=1.0, seed=5), ids) for _ in range(40)]
    assert len(set(sample(logits, same))) == 1
    seeds = [make_row(SamplingParams(temperature=1.0, seed=s), ids) for s in range(40)]
    assert len(set(sample(logits, seeds))) > 10
    positions = [
        make_row(SamplingParams(temperature=1.0, seed=5), ids * (n + 1)) for n in range(40)
    ]
    assert len(set(sample(logits, positions))) > 10


def seed_for(bits: int, position: int) -> int:
    """Return the seed whose number at `position` is bits * 2^-53: SplitMix64 backwards."""
    gamma, modulus = 0x9E3779B97F4A7C15, 1 << 64

    def unshifted(x: int, by: int) -> int:
        y = x
        for _ in range(64 // by):
            y = x ^ y >> by
        return y

    def unmixed(x: int) -> int:
        for by, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            x = unshifted(x, by) if factor == 1 else unshifted(x, by) * pow(factor, -1, modulus)
            x %= modulus
        return x

    stream = (unmixed(bits << 11) - (position + 1) * gamma) % modulus
    seed = (unmixed(stream) - gamma) % modulus
    return seed - modulus if seed >> 63 else seed


def test_every_token_gets_its_share_of_the_interval() -> None:
    """Exact, not statistical: u on a grid hits each token its probability's share of times."""
    n = 10_000
    grid = [*((i + 0.5) / n for i in range(n)), 0.0, 1 - 2.0**-53]
    rows = []
    for u in grid:
        seed = seed_for(int(u * 2**53), position=3)
        rows.append(make_row(SamplingParams(temperature=1.0, seed=seed)))
    assert [uniform(row) for row in rows[::500]] == pytest.approx(grid[::500], abs=2.0**-53)
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf"), 1.5]])
    found = sample(logits.expand(n + 2, 5), rows, 5)
    share = np.bincount(found[:n], minlength=5) / n
    np.testing.assert_allclose(share, torch.softmax(logits[0].double(), 0), atol=1 / n)
    assert share[3] == 0
    assert found[n:] == [0, 4]
