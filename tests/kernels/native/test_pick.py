"""The best tokens under packed masks, in C++, against the reference."""

import ctypes

import numpy as np
import pytest
import torch

from rootlace.kernels.native.library import Team
from rootlace.kernels.native.sampling import native_sampling
from tests.kernels.native.greedy import greedy_tokens
from tests.native import TARGETS, library_for


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library_for(request.param)


def best(library: ctypes.CDLL, logits: np.ndarray, masks: list[np.ndarray | None]) -> list[int]:
    pick = native_sampling(library, Team(library, 2)).pick_tokens
    return greedy_tokens(torch.from_numpy(logits), masks, pick).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 15, 31, 32, 33, 100, 4096, 5003])
def test_the_best_of_what_is_allowed(library: ctypes.CDLL, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    logits = np.round(random.standard_normal((40, vocab)), 1).astype(np.float32)  # with ties
    masks: list[np.ndarray | None] = []
    for row in range(len(logits)):
        share = random.choice([0.0, 0.003, 0.5, 0.99, 1.0])
        bits = np.zeros(32 * words, bool)
        bits[:vocab] = random.random(vocab) < share
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        masks.append(None if row % 7 == 0 else mask)
        # What is not allowed may be anything, also not a number.
        kind = (np.nan, np.inf, -np.inf, 1e30)[row % 4]
        forbidden = np.flatnonzero(~bits[:vocab])
        if row % 7 and len(forbidden):
            logits[row, random.choice(forbidden)] = kind
        if row % 5 == 1:
            logits[row, random.integers(vocab)] = kind
    expected = greedy_tokens(torch.from_numpy(logits), masks).tolist()
    assert best(library, logits, masks) == expected
    for row, mask in enumerate(masks):
        assert best(library, logits[row : row + 1].copy(), [mask]) == expected[row : row + 1]
        values = logits[row].astype(np.float64)
        bits = np.ones(vocab, bool) if mask is None else allowed(mask, vocab)
        chosen = np.where(bits, values, -np.inf)
        broken = np.isnan(chosen).any() or np.isinf(chosen.max())
        assert expected[row] == (-1 if broken else int(chosen.argmax()))


def allowed(mask: np.ndarray, vocab: int) -> np.ndarray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(bool)


def test_words_beyond_the_vocabulary_say_nothing(library: ctypes.CDLL) -> None:
    logits = np.zeros((1, 33), np.float32)
    logits[0, 5] = 1
    assert best(library, logits, [np.array([1 << 3, -2], np.int32)]) == [3]
    assert best(library, logits, [np.array([0, -2], np.int32)]) == [-1]
