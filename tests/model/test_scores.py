"""Scores against float64 log-softmax, ranking against Python's sort."""

import numpy as np
import pytest
import torch

from rootlace.kernels.interface import ScoreTokens
from rootlace.kernels.reference import REFERENCE, sampling
from rootlace.runtime.model import sampler
from rootlace.runtime.model.sampler import score_in_parts
from tests.native import native_kernel_set


@pytest.fixture(params=["reference", "native"])
def score(request: pytest.FixtureRequest) -> ScoreTokens:
    kernels = REFERENCE if request.param == "reference" else native_kernel_set()
    return kernels.score_tokens


def test_scores_are_log_softmax(score: ScoreTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 8, (9, 301)).astype(np.float32))
    tokens = torch.arange(9, dtype=torch.int32) * 31
    logprobs, top_ids, top_logprobs = found = score(logits, tokens, 7)
    exact = torch.log_softmax(logits.double(), 1)
    torch.testing.assert_close(logprobs.double(), exact[range(9), tokens], atol=1e-5, rtol=0)
    best = exact.topk(7, 1)
    torch.testing.assert_close(top_logprobs.double(), best.values, atol=1e-5, rtol=0)
    assert torch.equal(top_ids, best.indices.int())
    assert logprobs.dtype == top_logprobs.dtype == torch.float32
    monkeypatch.setattr(sampler, "LOGITS_BYTES", 301 * 4)
    parts = score_in_parts(score, logits.__getitem__, tokens, 7, 301, torch.cat)
    for one, other in zip(parts, found, strict=True):
        assert torch.equal(one, other)


def test_no_alternatives_and_nothing_sampled(score: ScoreTokens) -> None:
    logprobs, top_ids, top_logprobs = score(torch.zeros(2, 5), torch.tensor([-1, 3]), 0)
    assert logprobs[0].isnan()
    assert abs(logprobs[1] + np.log(5)) < 1e-6
    assert top_ids.shape == top_logprobs.shape == (2, 0)


def test_ranking_is_by_value_then_id() -> None:
    values = np.random.default_rng(1).integers(-4, 5, (6, 64)).astype(np.float32) / 4
    values[0, :5] = [0.0, -0.0, np.inf, -np.inf, 1e-45]
    for count in (1, 10, 64, 100):
        for find in (sampling.best_ids_by_keys, sampling.best_ids):
            found = find(torch.from_numpy(values), count).numpy()
            for row, ids in zip(values, found, strict=True):
                assert list(ids) == sorted(range(64), key=lambda i: (-row[i], i))[:count]
