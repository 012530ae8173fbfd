"""Sampling kernels at real vocabularies against the reference in float64 on the CPU.

(The reference itself is compared with loops over rows and tokens in `tests/model/test_sampler.py`.)
"""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rootlace.kernels.interface import AutomatonTables, Choice, KernelSet, LogitEdits, PickRows
from rootlace.kernels.reference import REFERENCE
from tests.kernels.cases import poisoned_memory, with_tensors
from tests.kernels.logit_edits import neutral_penalties

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(params=[128256, 151936, 32000, 50257])
def vocab(request: pytest.FixtureRequest, real: bool) -> int:
    """Of Llama 3, Qwen, Mistral and GPT-2: the last is no multiple of anything."""
    size: int = request.param
    return size if real else size // 250


def moved(value: Any, device: torch.device) -> Any:
    """A struct of tensors on another device."""
    return with_tensors(value, lambda tensor: tensor.to(device))


def logits_of(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=random) * 3).to(dtype)


def masks_of(vocab: int, seed: int = 0) -> torch.Tensor:
    """Random masks: one that allows everything, one nothing, one a single token, sparse, dense."""
    random = np.random.default_rng(seed)
    allowed = random.random((8, vocab)) < np.array([1, 0, 0, 0.001, 0.5, 0.5, 0.9, 0.02])[:, None]
    allowed[2, random.integers(vocab)] = True
    packed = np.zeros((8, -(-vocab // 32) * 4), np.uint8)
    bits = np.packbits(allowed, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return torch.from_numpy(packed.view(np.int32))


def edits_of(vocab: int, rows: int, masked: bool, listed: bool) -> LogitEdits:
    random = np.random.default_rng(7)
    edits = LogitEdits()
    if masked:
        row = torch.from_numpy(random.integers(-1, 8, rows).astype(np.int32))
        edits = msgspec.structs.replace(edits, mask_table=masks_of(vocab), mask_row=row)
    if not listed:
        return edits

    def lists(most: int) -> tuple[torch.Tensor, np.ndarray]:
        parts = [
            np.sort(random.choice(vocab, random.integers(0, most), replace=False))
            for _ in range(rows)
        ]
        start = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        return torch.from_numpy(start), np.concatenate(parts).astype(np.int32)

    bias_start, bias_token = lists(40)
    bias = random.normal(0, 5, len(bias_token)).astype(np.float32)
    bias[::7] = -np.inf
    seen_start, seen_token = lists(min(vocab // 2, 900))
    return msgspec.structs.replace(
        edits,
        bias_start=bias_start,
        bias_token=torch.from_numpy(bias_token),
        bias=torch.from_numpy(bias),
        seen_start=seen_start,
        seen_token=torch.from_numpy(seen_token),
        seen_count=torch.from_numpy(random.integers(0, 5, len(seen_token)).astype(np.int32)),
        penalties={
            **neutral_penalties(rows),
            "repetition_penalty": torch.from_numpy(random.uniform(0.5, 2, rows)),
            "frequency_penalty": torch.from_numpy(random.uniform(-1, 1, rows)),
            "presence_penalty": torch.from_numpy(random.uniform(-1, 1, rows)),
        },
    )


@pytest.mark.parametrize(("masked", "listed"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_edit_logits(
    kernels: KernelSet,
    device: torch.device,
    vocab: int,
    dtype: torch.dtype,
    masked: bool,
    listed: bool,
) -> None:
    logits, edits = logits_of(9, vocab, dtype), edits_of(vocab, 9, masked, listed)
    given = logits.to(device)
    with poisoned_memory():
        found = kernels.edit_logits(given, moved(edits, device))
    assert torch.equal(given.cpu(), logits)  # not changed
    torch.testing.assert_close(
        found.cpu(), REFERENCE.edit_logits(logits, edits), rtol=3e-6, atol=3e-6
    )


def rows_of(vocab: int, choice: Choice, masked: bool) -> PickRows:
    """Every combination of settings, in one batch."""
    greedy, random, cut = (0.0,), (0.0, 0.4, 1.0, 2.5), (0.0, 0.7, 1.0)
    temperatures = {"greedy": greedy, "random": random, "cut": cut}[choice]
    plain = [(vocab, 1.0, 0.0)]
    cuts = [(1, 1.0, 0.0), (40, 1.0, 0.0), (vocab, 0.9, 0.0), (vocab, 0.05, 0.0)]
    cuts += [(vocab, 1.0, 0.05), (50, 0.9, 0.01), (5000, 0.999, 0.0)]
    settings = [(t, *c) for t in temperatures for c in (plain + cuts if choice == "cut" else plain)]
    settings = [setting for setting in settings for _ in range(3)]
    count = len(settings)
    columns = list(zip(*settings, strict=True))
    generator = np.random.default_rng(3)
    masks = {}
    if masked:
        row = generator.integers(-1, 8, count).astype(np.int32)
        masks = {"mask_table": masks_of(vocab, 1), "mask_row": torch.from_numpy(row)}
    return PickRows(
        params={
            "temperature": torch.tensor(columns[0], dtype=torch.float64),
            "top_k": torch.tensor(columns[1], dtype=torch.int32),
            "top_p": torch.tensor(columns[2], dtype=torch.float64),
            "min_p": torch.tensor(columns[3], dtype=torch.float64),
        },
        seed=torch.from_numpy(generator.integers(-(2**63), 2**63 - 1, count)),
        position=torch.arange(count) * 37,
        **masks,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("choice", ["greedy", "random", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_pick_tokens(
    kernels: KernelSet,
    device: torch.device,
    vocab: int,
    dtype: torch.dtype,
    choice: Choice,
    masked: bool,
) -> None:
    rows = rows_of(vocab, choice, masked)
    logits = logits_of(len(rows.seed), vocab, dtype)
    logits[1, vocab // 3] = float("nan")
    logits[2] = float("-inf")
    expected = REFERENCE.pick_tokens(logits, rows, choice)
    assert expected[1] == expected[2] == -1
    given, there = logits.to(device), moved(rows, device)
    with poisoned_memory():
        found = kernels.pick_tokens(given, there, choice)
    assert found.dtype == torch.int32
    assert found.tolist() == expected.tolist()
    assert torch.equal(given.cpu().nan_to_num(), logits.nan_to_num())
    # Alone, and into a given place.
    for row in (0, 4 % len(expected), len(expected) - 1):
        alone = with_tensors(
            msgspec.structs.replace(there, mask_table=None), lambda t, at=row: t[at : at + 1]
        )
        alone = msgspec.structs.replace(alone, mask_table=there.mask_table)
        out = torch.full((1,), 77, dtype=torch.int32, device=device)
        kernels.pick_tokens(given[row : row + 1], alone, choice, out)
        assert out.item() == expected[row]


def test_equal_logits_rank_by_id(kernels: KernelSet, device: torch.device, vocab: int) -> None:
    """As bfloat16 logits are: many of them the same."""
    logits = logits_of(12, vocab, torch.float32).mul(2).round().div(2)
    for choice in ("greedy", "cut"):
        rows = moved(rows_of(vocab, choice, False), CPU)
        rows = with_tensors(rows, lambda t: t[:12])
        values = logits[: len(rows.seed)]
        found = kernels.pick_tokens(values.to(device), moved(rows, device), choice)
        assert found.tolist() == REFERENCE.pick_tokens(values, rows, choice).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_token_logprobs(
    kernels: KernelSet, device: torch.device, vocab: int, dtype: torch.dtype
) -> None:
    logits = logits_of(7, vocab, dtype)
    tokens = torch.tensor([0, vocab - 1, -1, 5, vocab // 2, 33, 1], dtype=torch.int32)
    with poisoned_memory():
        found = kernels.token_logprobs(logits.to(device), tokens.to(device)).cpu()
    exact = logits.double().log_softmax(-1)
    assert found[2].isnan()
    for row, token in enumerate(tokens.tolist()):
        if token >= 0:
            assert float(found[row]) == pytest.approx(float(exact[row, token]), abs=2e-5)


def test_step_automata(kernels: KernelSet, device: torch.device, vocab: int) -> None:
    random = np.random.default_rng(11)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(low, high, shape).astype(np.int32))

    states, classes, automata, masks, rows = 60, 7, 3, 9, 40
    tables = AutomatonTables(
        mask_of=numbers(0, masks, states),
        class_row=numbers(0, automata, states),
        next_start=torch.arange(states, dtype=torch.int32) * classes,
        next_state=numbers(0, states, states * classes),
        token_class=numbers(0, classes, automata, vocab),
        masks=masks_of(vocab),
    )
    before, given = numbers(-1, states, rows), numbers(-1, masks, rows)
    tokens = numbers(0, vocab, 64)
    tokens[5], tokens[6] = -1, vocab
    source = numbers(-1, 64, rows)
    source[:2] = torch.tensor([5, 6])
    expected = REFERENCE.step_automata(before, source, tokens, given, tables)
    found = kernels.step_automata(
        before.to(device),
        source.to(device),
        tokens.to(device),
        given.to(device),
        moved(tables, device),
    )
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.int32 and one.tolist() == other.tolist()
