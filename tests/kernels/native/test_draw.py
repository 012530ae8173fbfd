"""Tokens drawn in C++ equal the reference's, with large vocabularies, hard cuts and masks
(`tests/model/test_sampler.py` compares both with loops over tokens)."""

import msgspec
import numpy as np
import pytest
import torch

from rootlace.kernels.interface import HostSampling, PickRows
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.automaton_table import HostMasks
from rootlace.runtime.model.executor.torch_setup import host_sampling
from rootlace.runtime.model.sampler import Sampler
from rootlace.wire.protocol import SamplingParams
from tests.native import native_host_sampling

PARAMS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_p=0.999, seed=3),
    SamplingParams(temperature=0.9, top_k=50, seed=4),
    SamplingParams(temperature=2.0, top_k=5000, top_p=0.95, seed=5),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.5, min_p=0.02, seed=6),
    SamplingParams(temperature=1.0, min_p=0.1, seed=7),
    SamplingParams(temperature=1.0, top_k=1, seed=8),
    SamplingParams(temperature=1.0, top_p=1e-9, seed=9),
]


@pytest.fixture(scope="module")
def native() -> HostSampling:
    return native_host_sampling(threads=3)


def rows(count: int, masks: list[np.ndarray | None] | None = None) -> list[SampleRow]:
    found = []
    for i in range(count):
        ids = np.arange(3 + i, dtype=np.int32)
        found.append(SampleRow(i, PARAMS[i % len(PARAMS)], ids, 2, masks[i] if masks else None))
    return found


def drawn(logits: torch.Tensor, rows: list[SampleRow], kernels: HostSampling) -> list[int]:
    vocab = logits.shape[1]
    return Sampler(vocab, kernels, HostMasks(vocab)).sample(logits.numpy(), rows).tolist()


def normal(count: int, vocab: int, scale: float, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, scale, (count, vocab))
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("vocab", [1, 2, 16, 1000, 1024, 1025, 32_000])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 4.0, 30.0])
def test_as_torch_draws(native: HostSampling, vocab: int, scale: float) -> None:
    """Flat distributions, where a cut goes through the middle of equals, to sharp ones."""
    asked = rows(45)
    logits = normal(len(asked), vocab, scale, seed=vocab)
    assert drawn(logits, asked, native) == drawn(logits, asked, host_sampling())
    rounded = logits.bfloat16().float()  # with many ties
    assert drawn(rounded, asked, native) == drawn(rounded, asked, host_sampling())


def test_under_masks(native: HostSampling) -> None:
    vocab, count = 5003, 60
    random = np.random.default_rng(0)
    masks: list[np.ndarray | None] = []
    for i in range(count):
        share = random.choice([0.0, 3e-4, 0.02, 0.5, 1.0])
        bits = np.packbits(random.random(32 * -(-vocab // 32)) < share, bitorder="little")
        words = bits.view(np.int32)
        masks.append((None, words, words[:40])[i % 3])
    asked = rows(count, masks)
    # Some have more than a mask.
    asked = [
        msgspec.structs.replace(row, banned=(5, 77)) if i % 4 == 0 else row
        for i, row in enumerate(asked)
    ]
    logits = normal(count, vocab, 3.0, seed=1)
    assert drawn(logits, asked, native) == drawn(logits, asked, host_sampling())


def test_what_is_forbidden_may_be_anything(native: HostSampling) -> None:
    vocab = 100
    mask = np.zeros(4, np.int32)
    mask[1] = 0b1010
    logits = torch.full((len(PARAMS), vocab), float("nan"))
    logits[:, 33], logits[:, 35] = 1.0, 2.0
    found = drawn(logits, rows(len(PARAMS), [mask] * len(PARAMS)), native)
    assert set(found) <= {33, 35}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number(native: HostSampling, value: float) -> None:
    logits = normal(len(PARAMS), 1000, 1.0, seed=0)
    logits[:, 999] = value
    assert drawn(logits, rows(len(PARAMS)), native) == [-1] * len(PARAMS)
    logits[:] = -torch.inf
    assert drawn(logits, rows(len(PARAMS)), native) == [-1] * len(PARAMS)


def test_most_tokens_impossible(native: HostSampling) -> None:
    logits = torch.full((45, 32_000), -torch.inf)
    logits[:, 10_000:10_040] = normal(45, 40, 5.0, seed=3)
    asked = rows(45)
    assert drawn(logits, asked, native) == drawn(logits, asked, host_sampling())


def test_a_row_is_drawn_alike_in_any_company(native: HostSampling) -> None:
    asked = rows(27)
    logits = normal(len(asked), 4099, 2.0, seed=5)
    alone = [drawn(logits[i : i + 1], asked[i : i + 1], native)[0] for i in range(len(asked))]
    assert drawn(logits, asked, native) == alone


def test_frequencies(native: HostSampling) -> None:
    """Twenty thousand draws from ten tokens."""
    logits = torch.linspace(-2, 2, 10).expand(20_000, 10)
    params = SamplingParams(temperature=1.0, seed=11)
    ids = np.zeros(20_000, np.int32)
    asked = [SampleRow(i, params, ids[: i + 1], 1) for i in range(20_000)]
    counts = np.bincount(drawn(logits, asked, native), minlength=10) / 20_000
    assert np.abs(counts - torch.softmax(logits[0], 0).numpy()).max() < 0.012


def pick_rows(count: int, top_k: int = 1000, masks: tuple[int, ...] | None = None) -> PickRows:
    def all_of(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    return PickRows(
        params={
            "temperature": all_of(1.0, torch.float64),
            "top_k": all_of(top_k, torch.int32),
            "top_p": all_of(1.0, torch.float64),
            "min_p": all_of(0.0, torch.float64),
        },
        seed=all_of(3, torch.int64),
        position=all_of(5, torch.int64),
        mask_table=None if masks is None else torch.full((2, 4), -1, dtype=torch.int32),
        mask_row=None if masks is None else torch.tensor(masks, dtype=torch.int32),
    )


def test_no_token_at_all_is_one(native: HostSampling) -> None:
    logits = normal(4, 100, 1.0, seed=2)
    found = native.pick_tokens(logits, pick_rows(4, top_k=0), "cut")
    assert found.tolist() == logits.argmax(1).tolist()


def test_other_parameters_than_the_kernel_reads_are_refused(native: HostSampling) -> None:
    rows = pick_rows(4)
    for params in ({**rows.params, "another": rows.params["top_p"]}, {}):
        with pytest.raises(ValueError, match="the kernel reads"):
            native.pick_tokens(
                normal(4, 100, 1.0, seed=2), msgspec.structs.replace(rows, params=params), "cut"
            )


def test_lengths_that_do_not_fit(native: HostSampling) -> None:
    logits = normal(4, 100, 1.0, seed=2)
    short = torch.empty(3, dtype=torch.int32)
    for given, out in (
        (pick_rows(3), None),
        (pick_rows(4), short),
        (pick_rows(4, masks=(0, 1, 0)), None),
        (pick_rows(4, masks=(0, 1, 2, -1)), None),
    ):
        with pytest.raises(ValueError):
            native.pick_tokens(logits, given, "cut", out)
    assert len(native.pick_tokens(logits, pick_rows(4, masks=(0, 1, 1, -1)), "cut")) == 4
