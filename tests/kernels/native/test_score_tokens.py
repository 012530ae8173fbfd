"""Log-probabilities in C++ against float64 and Python's sort."""

import ctypes

import numpy as np
import pytest
import torch

from rootlace.kernels.interface import Scores, ScoreTokens
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.sampling import native_sampling
from rootlace.kernels.reference.sampling import score_tokens
from tests.native import TARGETS, library_for, of_tensors


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library_for(request.param)


@pytest.fixture(scope="module")
def score(library: ctypes.CDLL) -> ScoreTokens:
    return scoring(library, 2)


def scoring(library: ctypes.CDLL, threads: int) -> ScoreTokens:
    return of_tensors(native_sampling(library, Team(library, threads)).score_tokens)


def rows_of(count: int, vocab: int, scale: float, seed: int, ties: bool) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, scale, (count, vocab))
    logits = torch.from_numpy(values.astype(np.float32))
    return logits.bfloat16().float() if ties else logits


def same(found: Scores, expected: Scores) -> bool:
    """Bit by bit; NaN equals NaN."""
    return all(
        a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(found, expected, strict=True)
    )


# Lengths around those of vectors, blocks of a sum and pieces of a row.
@pytest.mark.parametrize("vocab", [1, 15, 17, 1000, 1025, 16_384, 16_385, 40_001])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0, 60.0])
def test_against_float64(score: ScoreTokens, vocab: int, scale: float) -> None:
    count = 5
    for ties, top in ((False, 0), (True, 1), (False, 5), (True, 20), (True, 300)):
        logits = rows_of(count, vocab, scale, seed=vocab + top, ties=ties)
        logits[0, vocab // 2 :] = -torch.inf
        logits[0, 0] = 0.0
        tokens = torch.arange(count) * 7919 % vocab
        logprobs, top_ids, top_logprobs = score(logits, tokens, top)
        exact = torch.log_softmax(logits.double(), 1)
        torch.testing.assert_close(
            logprobs.double(), exact[range(count), tokens], atol=1e-6, rtol=3e-7
        )
        assert top_ids.shape == top_logprobs.shape == (count, min(top, vocab))
        for row, ids, found in zip(logits.numpy(), top_ids.numpy(), top_logprobs, strict=True):
            assert ids.tolist() == np.lexsort((np.arange(vocab), -row))[:top].tolist()
            assert not found.isnan().any()
        expected = exact.gather(1, top_ids.long())
        torch.testing.assert_close(top_logprobs.double(), expected, atol=1e-6, rtol=3e-7)


def test_bits_depend_neither_on_company_nor_on_threads(
    library: ctypes.CDLL, score: ScoreTokens
) -> None:
    logits = rows_of(9, 33_333, 5.0, seed=3, ties=False)
    tokens = torch.arange(9) * 3001
    together = score(logits, tokens, 6)
    for row in range(9):
        part = slice(row, row + 1)
        alone = score(logits[part].clone(), tokens[part], 6)
        assert same(alone, tuple(each[part] for each in together))
    for threads in (1, 5):
        assert same(scoring(library, threads)(logits, tokens, 6), together)


def test_fewer_alternatives_are_the_first_of_more(score: ScoreTokens) -> None:
    logits = rows_of(4, 20_000, 2.0, seed=8, ties=True)
    tokens = torch.zeros(4, dtype=torch.int32)
    _, ids, logprobs = score(logits, tokens, 40)
    for top in (1, 7, 39):
        _, some, values = score(logits, tokens, top)
        assert torch.equal(some, ids[:, :top]) and torch.equal(values, logprobs[:, :top])


def test_what_is_no_number(score: ScoreTokens) -> None:
    """Rows with NaN or an infinite logit, or nothing but -inf, give the reference's results."""
    logits = rows_of(6, 20_000, 2.0, seed=4, ties=False)
    logits[0, 17_000] = float("nan")
    logits[1, [3, 19_999]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = -torch.inf
    tokens = torch.tensor([4, 4, 4, 5, -1, 20_000])
    found, top_ids, top_logprobs = score(logits, tokens, 3)
    wanted, ids, values = score_tokens(logits[:5], tokens[:5], 3)
    torch.testing.assert_close(found[:5], wanted, equal_nan=True)
    assert found[5].isnan()
    assert torch.equal(top_ids[1:5], ids[1:]) and top_ids[0, 0] == 17_000
    torch.testing.assert_close(top_logprobs[:5], values, equal_nan=True)


def test_a_token_for_each_row(score: ScoreTokens) -> None:
    with pytest.raises(ValueError, match="for 3 rows"):
        score(torch.zeros(3, 10), torch.zeros(2, dtype=torch.int32), 1)
