"""Logits edited in C++ equal the reference's, bit for bit (`tests/model/test_sampler.py` compares
both with their formulas)."""

import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import EditLogits, LogitEdits
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.sampling import native_sampling
from rootlace.kernels.reference.sampling import edit_logits
from tests.kernels.logit_edits import edits_of, neutral_penalties
from tests.native import TARGETS, library_for, of_tensors


@pytest.fixture(scope="module", params=TARGETS)
def native(request: pytest.FixtureRequest) -> EditLogits:
    library = library_for(request.param)
    return of_tensors(native_sampling(library, Team(library, 2)).edit_logits)


@pytest.mark.parametrize("kinds", ["b", "m", "p", "bm", "bmp"])
@pytest.mark.parametrize("vocab", [1, 33, 1000])
def test_as_the_reference(native: EditLogits, kinds: str, vocab: int) -> None:
    for seed in range(4):
        edits = edits_of(7, vocab, kinds, seed)
        generator = torch.Generator().manual_seed(seed)
        logits = 4 * torch.randn(7, vocab, generator=generator)
        logits[0, 0], logits[1, -1] = float("nan"), torch.inf
        kept = logits.clone()
        found, expected = native(logits, edits), edit_logits(logits, edits)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(logits.view(torch.int32), kept.view(torch.int32))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_tokens_that_there_are_not_are_skipped(native: EditLogits) -> None:
    logits = torch.ones(1, 40)
    edits = LogitEdits(
        bias_start=ints(0, 3),
        bias_token=ints(-1, 7, 40),
        bias=torch.tensor([1.0, 2.0, 3.0]),
        seen_start=ints(0, 3),
        seen_token=ints(2, 2**30, -5),
        seen_count=ints(0, 0, 0),
        penalties={
            **neutral_penalties(1),
            "repetition_penalty": torch.tensor([2.0], dtype=torch.float64),
        },
    )
    expected = torch.ones(1, 40)
    expected[0, 7], expected[0, 2] = 3.0, 0.5
    assert torch.equal(native(logits, edits), expected)


@pytest.mark.parametrize(
    "edits",
    [
        LogitEdits(bias_start=ints(0, 1), bias_token=ints(1), bias=torch.ones(1)),
        LogitEdits(bias_start=ints(0, 1, 2), bias_token=ints(1), bias=torch.ones(2)),
        LogitEdits(bias_start=ints(0, 1, 2), bias_token=ints(1, 2), bias=torch.ones(1)),
        LogitEdits(bias_start=ints(0, 2, 1), bias_token=ints(1), bias=torch.ones(1)),
        LogitEdits(bias_start=ints(-1, 0, 1), bias_token=ints(1), bias=torch.ones(1)),
        LogitEdits(mask_table=torch.zeros(3, 2, dtype=torch.int32), mask_row=ints(0, 3)),
        LogitEdits(mask_table=torch.zeros(3, 2, dtype=torch.int32), mask_row=ints(0)),
        LogitEdits(seen_start=ints(0, 0, 0), seen_token=ints(), seen_count=ints()),
    ],
)
def test_lengths_that_do_not_fit(native: EditLogits, edits: LogitEdits) -> None:
    with pytest.raises(ValueError):
        native(torch.zeros(2, 40), edits)


def test_other_penalties_than_the_kernel_reads_are_refused(native: EditLogits) -> None:
    edits = edits_of(2, 40, "p")
    for penalties in ({**edits.penalties, "echo_penalty": torch.zeros(2)}, {}):
        with pytest.raises(ValueError, match="the kernel reads"):
            native(torch.zeros(2, 40), replace(edits, penalties=penalties))
