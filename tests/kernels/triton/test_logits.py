"""Edits of logits in Triton against a plain loop, and against the reference bit for bit."""

import importlib
import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import LogitEdits
from rootlace.kernels.reference.sampling import edit_logits as reference
from rootlace.kernels.triton.launching import Launch
from rootlace.kernels.triton.logits import edit_logits
from tests.kernels.cases import with_tensors
from tests.kernels.logit_edits import edits_of

module = importlib.import_module("rootlace.kernels.triton.logits")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several tiles, and lists longer than one comparison."""
    launch = Launch({"BLOCK": 128, "ENTRIES": 8}, 2, 1)
    monkeypatch.setattr(module, "settings", lambda kernel, arch: launch)


def plain(logits: torch.Tensor, edits: LogitEdits) -> list[list[float]]:
    found = [[float(value) for value in row] for row in logits.float()]
    for row, x in enumerate(found):
        if edits.bias_start is not None:
            for i in range(int(edits.bias_start[row]), int(edits.bias_start[row + 1])):
                x[int(edits.bias_token[i])] += float(edits.bias[i])
        if edits.mask_row is not None and int(edits.mask_row[row]) >= 0:
            words = edits.mask_table[int(edits.mask_row[row])].tolist()
            for token in range(len(x)):
                if token // 32 >= len(words) or not words[token // 32] >> token % 32 & 1:
                    x[token] = -math.inf
        if edits.seen_start is not None:
            for i in range(int(edits.seen_start[row]), int(edits.seen_start[row + 1])):
                token, count = int(edits.seen_token[i]), int(edits.seen_count[i])
                given = {name: float(values[row]) for name, values in edits.penalties.items()}
                r = given["repetition_penalty"]
                x[token] = x[token] / r if x[token] > 0 else x[token] * r
                if count:
                    x[token] -= given["frequency_penalty"] * count + given["presence_penalty"]
    return found


def edited(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    there = with_tensors(edits, lambda tensor: tensor.to(DEVICE))
    moved = logits.to(DEVICE)
    kept = moved.clone()
    found = edit_logits(moved, there)
    assert torch.equal(moved.nan_to_num(), kept.nan_to_num()) and found.dtype == torch.float32
    return found.cpu()


@pytest.mark.parametrize("kinds", ["", "b", "m", "p", "bm", "bp", "mp", "bmp"])
def test_every_combination(kinds: str) -> None:
    """Each dtype takes half of the combinations with several tiles, and one with a single tile."""
    dtypes = (torch.float32, torch.bfloat16)[:: 1 if len(kinds) % 2 else -1]
    for seed, (vocab, dtype) in enumerate(zip((300, 65), dtypes, strict=True)):
        logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)
        edits = edits_of(5, vocab, kinds, seed)
        found = edited(logits * 4, edits)
        np.testing.assert_allclose(found, plain(logits * 4, edits), rtol=1e-5, atol=1e-5)
        assert torch.equal(found, reference(logits * 4, edits))


def test_entries_at_the_borders_of_tiles() -> None:
    """First and last tokens of tiles, and rows beside each other that must not mix."""
    vocab = 400
    tokens = torch.tensor([0, 127, 128, 255, 256, 399] * 2, dtype=torch.int32)
    edits = LogitEdits(
        bias_start=torch.tensor([0, 6, 6, 12], dtype=torch.int32),
        bias_token=tokens,
        bias=torch.arange(1, 13).float(),
    )
    logits = torch.zeros(3, vocab)
    found = edited(logits, edits)
    expected = torch.zeros(3, vocab)
    expected[0, tokens[:6].long()] = torch.arange(1, 7).float()
    expected[2, tokens[:6].long()] = torch.arange(7, 13).float()
    assert torch.equal(found, expected)


def test_what_is_not_a_number_stays_in_its_place() -> None:
    logits = torch.zeros(2, 200)
    logits[0, [3, 150]] = torch.tensor([math.nan, math.inf])
    edits = edits_of(2, 200, "m")
    found = edited(logits, replace(edits, mask_row=torch.tensor([-1, -1], dtype=torch.int32)))
    assert found[0, 3].isnan() and found[0, 150] == math.inf
    assert not found[1].any()


def test_strides_and_no_rows() -> None:
    wide = torch.randn(4, 300)
    edits = edits_of(4, 200, "bmp")
    assert torch.equal(edited(wide[:, :200], edits), reference(wide[:, :200], edits))
    turned = wide[:, :200].t().contiguous().t()
    assert torch.equal(edited(turned, edits), reference(wide[:, :200], edits))
    assert edited(wide[:0], LogitEdits()).shape == (0, 300)
