"""Scores against float64 log-softmax, ranking against Python's sort."""

from __future__ import annotations

import numpy as np
import torch

from rootlace.runtime.model.sampling.ranking import best_ids
from rootlace.runtime.model.sampling.scores import concatenate, score_tokens


def test_scores_are_log_softmax() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 8, (9, 301)).astype(np.float32))
    tokens = np.arange(9, dtype=np.int32) * 31
    scores = score_tokens(logits, tokens, 7)
    exact = torch.log_softmax(logits.double(), 1).numpy()
    np.testing.assert_allclose(scores.logprobs, exact[np.arange(9), tokens], atol=1e-5)
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-exact, 1)[:, :7], atol=1e-5)
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == np.float32
    assert scores.top_ids.dtype == np.int32
    joined = concatenate(
        [score_tokens(logits[a : a + 4], tokens[a : a + 4], 7) for a in (0, 4, 8)], 7
    )
    np.testing.assert_array_equal(joined.logprobs, scores.logprobs)
    np.testing.assert_array_equal(joined.top_ids, scores.top_ids)


def test_no_alternatives_no_tokens_and_nothing_sampled() -> None:
    scores = score_tokens(torch.zeros(2, 5), np.array([-1, 3]), 0)
    assert np.isnan(scores.logprobs[0])
    assert abs(scores.logprobs[1] + np.log(5)) < 1e-6
    assert scores.top_ids.shape == scores.top_logprobs.shape == (2, 0)
    empty = concatenate([], 3)
    assert (empty.logprobs.shape, empty.top_ids.shape) == ((0,), (0, 3))


def test_ranking_is_by_value_then_id() -> None:
    values = np.random.default_rng(1).integers(-4, 5, (6, 64)).astype(np.float32) / 4
    values[0, :5] = [0.0, -0.0, np.inf, -np.inf, 1e-45]
    for count in (1, 10, 64, 100):
        found = best_ids(torch.from_numpy(values), count).numpy()
        for row, ids in zip(values, found, strict=True):
            assert list(ids) == sorted(range(64), key=lambda i: (-row[i], i))[:count]
