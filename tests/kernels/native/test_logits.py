"""Logits in C++, computed only for tokens that a row may choose, for every kind of processor."""

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from rootlace.kernels.native.library import Model, Team
from rootlace.kernels.native.linear import DTYPES, Epilogue
from rootlace.kernels.reference.layers import quantise
from rootlace.kernels.weights import Dense, Scheme
from tests.kernels.native.greedy import greedy_tokens
from tests.kernels.native.layouts import PackedLinear
from tests.native import TARGETS, library_for

PANEL = 48


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library_for(request.param)


class Head:
    def __init__(
        self,
        library: ctypes.CDLL,
        vocab: int,
        hidden: int,
        dtype: torch.dtype,
        threads: int,
        integers: bool = False,
    ) -> None:
        self.library, self.vocab = library, vocab
        self.team = Team(library, threads)
        generator = torch.Generator().manual_seed(vocab)
        matrix = torch.randn(vocab, hidden, generator=generator)
        weight = quantise(matrix, Scheme("int8")) if integers else Dense(matrix.to(dtype))
        self.packed = PackedLinear(library, self.team, weight, dtype)
        self.model = Model(dtype=DTYPES[dtype], hidden=hidden, vocab=vocab)
        self.model.head = self.packed.structure

    def all(self, x: Tensor) -> np.ndarray:
        out = torch.full((len(x), self.vocab), torch.nan)
        self.packed.multiply(Epilogue.FLOAT32, x, out)
        return out.numpy()

    def among(self, x: Tensor, masks: list[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
        """Logits, NaN where nothing was written, and the best tokens."""
        logits = np.full((len(x), self.vocab), np.nan, np.float32)
        tokens = np.full(len(x), -7, np.int32)
        where = [0 if mask is None else mask.ctypes.data for mask in masks]
        addresses = np.array(where, np.int64)
        self.library.rl_logits(
            self.team.handle,
            ctypes.addressof(self.model),
            x.data_ptr(),
            len(x),
            addresses.ctypes.data,
            logits.ctypes.data,
            tokens.ctypes.data,
        )
        return logits, tokens


def random_masks(random: np.random.Generator, rows: int, vocab: int) -> list[np.ndarray | None]:
    """Return masks of all kinds: empty, one token, a run, a sprinkle, nearly all, all, and none."""
    masks: list[np.ndarray | None] = []
    for _ in range(rows):
        bits = np.zeros(-(-vocab // 32) * 32, bool)
        kind = random.integers(8)
        if kind == 1:
            bits[random.integers(vocab)] = True
        elif kind == 2:
            start = random.integers(vocab)
            bits[start : min(start + random.integers(1, 90), vocab)] = True
        elif kind == 3:
            bits[random.integers(0, vocab, 5)] = True
        elif kind == 4:
            bits[:vocab] = random.random(vocab) < 0.97
        elif kind >= 5:
            bits[:vocab] = kind != 5 or random.random(vocab) < 0.5
        masks.append(None if kind == 7 else np.packbits(bits, bitorder="little").view(np.int32))
    return masks


def allowed(mask: np.ndarray | None, vocab: int) -> np.ndarray:
    if mask is None:
        return np.ones(vocab, bool)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(bool)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, integers",
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize(
    "vocab, hidden, threads",
    [(1, 4, 2), (47, 33, 1), (96, 64, 1), (100, 16, 2), (150, 701, 1), (1500, 96, 2)],
)
def test_what_may_be_chosen_has_the_bits_of_the_whole_product(
    library: ctypes.CDLL, vocab: int, hidden: int, threads: int, dtype: torch.dtype, integers: bool
) -> None:
    random = np.random.default_rng(vocab)
    head = Head(library, vocab, hidden, dtype, threads, integers)
    for rows in (1, 2, 7, 8, 9, 20, 130):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, hidden, generator=generator).to(dtype)
        masks = random_masks(random, rows, vocab)
        whole = head.all(x)
        logits, tokens = head.among(x, masks)
        for row, mask in enumerate(masks):
            may = allowed(mask, vocab)
            assert (logits[row][may].view(np.int32) == whole[row][may].view(np.int32)).all()
            # The others are right or were left alone.
            others = logits[row][~may]
            assert (np.isnan(others) | (others == whole[row][~may])).all()
        assert tokens.tolist() == greedy_tokens(torch.from_numpy(whole), masks).tolist()
        row = rows // 2
        alone, token = head.among(x[row : row + 1].clone(), masks[row : row + 1])
        may = allowed(masks[row], vocab)
        assert (alone[0][may] == logits[row][may]).all() and token[0] == tokens[row]


def test_panels_in_which_nobody_may_choose_are_left_out(library: ctypes.CDLL) -> None:
    vocab, rows = 20 * PANEL, 3
    head = Head(library, vocab, 32, torch.float32, 2)
    masks = []
    for row in range(rows):
        bits = np.zeros(vocab, bool)
        bits[5 * row * PANEL + 7] = True
        masks.append(np.packbits(bits, bitorder="little").view(np.int32))
    logits, tokens = head.among(torch.randn(rows, 32), list(masks))
    written = ~np.isnan(logits)
    for row in range(rows):
        panels = np.flatnonzero(written[row].reshape(-1, PANEL).any(1))
        assert panels.tolist() == [5 * row]
    assert tokens.tolist() == [7, 5 * PANEL + 7, 10 * PANEL + 7]


def test_no_masks_and_no_tokens(library: ctypes.CDLL) -> None:
    head = Head(library, 100, 16, torch.bfloat16, 2)
    x = torch.randn(4, 16).to(torch.bfloat16)
    logits = np.full((4, 100), np.nan, np.float32)
    library.rl_logits(
        head.team.handle,
        ctypes.addressof(head.model),
        x.data_ptr(),
        4,
        None,
        logits.ctypes.data,
        None,
    )
    assert np.array_equal(logits, head.all(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_numbers_has_no_token_and_spoils_no_other(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    vocab, hidden, rows = 700, 48, 20
    random = np.random.default_rng(1)
    head = Head(library, vocab, hidden, dtype, 2)
    x = torch.randn(rows, hidden).to(dtype)
    masks = random_masks(random, rows, vocab)
    _, expected = head.among(x, masks)
    for bad in range(rows):
        spoilt = x.clone()
        spoilt[bad, bad] = torch.nan
        _, tokens = head.among(spoilt, masks)
        assert tokens[bad] == -1
        assert np.delete(tokens, bad).tolist() == np.delete(expected, bad).tolist()
