"""Logits edited in C++ are those of the reference, bit for bit (`tests/model/test_sampler.py`
compares both with their formulas)."""

from __future__ import annotations

import pytest
import torch

from rootlace.kernels.native.edit_logits import NativeEditLogits
from rootlace.kernels.native.handles import Team
from rootlace.kernels.reference.logits import edit_logits
from tests.kernels.logit_edits import edits_of
from tests.native import TARGETS, library_for


@pytest.fixture(scope="module", params=TARGETS)
def native(request: pytest.FixtureRequest) -> NativeEditLogits:
    library = library_for(request.param)
    return NativeEditLogits(library, Team(library, 2))


@pytest.mark.parametrize("kinds", ["b", "m", "p", "bm", "bmp"])
@pytest.mark.parametrize("vocab", [1, 33, 1000])
def test_as_the_reference(native: NativeEditLogits, kinds: str, vocab: int) -> None:
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
