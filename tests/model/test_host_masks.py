"""The masks of a step on the host against plain loops."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.plan import MaskRow, SampleRow
from rootlace.runtime.model.automaton_table import HostMasks
from rootlace.runtime.model.decoder.native_decoder import addresses_of
from rootlace.wire.protocol import SamplingParams

VOCAB = 70
WORDS = 3


class Table:
    """Rows of random words; row 9 is not filled."""

    def __init__(self, key: int, words: int = WORDS) -> None:
        self.key = key
        random = np.random.default_rng(key)
        self.rows = random.integers(-(2**31), 2**31, (10, words)).astype(np.int32)
        self.reads: list[int] = []

    def filled(self, row: int) -> bool:
        self.reads.append(row)
        return row != 9


def as_words(mask: np.ndarray | MaskRow) -> np.ndarray:
    words = mask.table.rows[mask.row] if isinstance(mask, MaskRow) else mask
    return np.concatenate([words, np.zeros(WORDS, np.int32)])[:WORDS]


masks = (
    st.none()
    | st.builds(
        MaskRow,
        st.sampled_from([Table(3), Table(5), Table(8, 2), Table(9, 4)]),
        st.integers(0, 8),
    )
    | st.builds(
        lambda seed, words: np.random.default_rng(seed).integers(-9, 9, words).astype(np.int32),
        st.integers(0, 1000),
        st.integers(0, 4),
    )
)
bans = st.lists(st.integers(-1, VOCAB + 40), max_size=4)


def row_of(mask: np.ndarray | MaskRow | None, banned: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(0, SamplingParams(), np.array([1]), 1, mask, banned)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(masks, bans), max_size=12), st.integers(0, 3))
def test_any_masks_and_bans(
    asked: list[tuple[np.ndarray | MaskRow | None, list[int]]], empty: int
) -> None:
    rows = [row_of(mask, tuple(banned)) for mask, banned in asked]
    before = [None if mask is None else as_words(mask).copy() for mask, _ in asked]
    host = HostMasks(VOCAB)
    arrays = host.arrays(rows, len(rows) + empty)
    table, row = arrays["mask_table"], arrays["mask_row"]
    assert table.shape[1] == WORDS and (row[len(rows) :] == -1).all()
    alone = [host.of(one) for one in rows]
    addresses, _kept = addresses_of(alone, VOCAB)
    for at, ((mask, banned), words) in enumerate(zip(asked, before, strict=True)):
        allowed = np.ones(VOCAB, bool)
        if words is not None:
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            assert (as_words(mask) == words).all()  # whoever made it may use it again
        allowed[[token for token in banned if 0 <= token < VOCAB]] = False
        found = np.full(WORDS, -1, np.int32) if row[at] < 0 else table[row[at]]
        where = addresses[at] if addresses else 0
        read = np.full(WORDS, -1, np.int32)
        if where:
            read[:] = (ctypes.c_int32 * WORDS).from_address(where)
        for each in (found, read):
            bits = np.unpackbits(each.view(np.uint8), bitorder="little")[:VOCAB]
            assert (bits == allowed).all()


@pytest.mark.parametrize("banned", [(), (3,)])
def test_a_row_that_is_not_filled_is_refused(banned: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="row 9 of mask table 1 is not filled"):
        HostMasks(VOCAB).arrays([row_of(MaskRow(Table(1), 9), banned)], 1)
