"""Masks on the device against the host's arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import MaskRow, SampleRow
from rootlace.runtime.model.sampling.logit_edits import edit_logits
from rootlace.runtime.model.sampling.mask_tables import MaskTables
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


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 4, 40, 1000]))
def test_any_sequence_of_steps(data: st.DataObject, slots: int) -> None:
    """However little room there is, each step finds its own masks."""
    tables = [Table(key, words) for key, words in ((3, WORDS), (5, WORDS), (8, 2), (9, 4))]
    device = MaskTables(VOCAB, "cpu", max_bytes=slots * 4 * WORDS)
    choice = st.builds(MaskRow, st.sampled_from(tables), st.integers(0, 8)) | st.builds(
        lambda seed, words: np.random.default_rng(seed).integers(-9, 9, words).astype(np.int32),
        st.integers(0, 1000),
        st.integers(0, 4),
    )
    largest = 0
    for _ in range(data.draw(st.integers(1, 6))):
        masks = data.draw(st.lists(choice, min_size=1, max_size=12))
        largest = max(largest, len(masks))
        table, rows = device.place(masks)
        expected = np.stack([as_words(mask) for mask in masks])
        np.testing.assert_array_equal(table[rows].numpy(), expected)
        assert device.nbytes <= 4 * WORDS * max(slots, 32 * -(-2 * largest // 32))


def test_a_row_is_uploaded_once() -> None:
    table = Table(1)
    device = MaskTables(VOCAB, "cpu")
    for _ in range(3):
        device.place([MaskRow(table, 4), MaskRow(table, 7), MaskRow(table, 4)])
    assert table.reads == [4, 7]
    # A table that grew by being replaced is the same table.
    table.rows = np.concatenate([table.rows, table.rows])
    device.place([MaskRow(table, 7)])
    assert table.reads == [4, 7]


def test_what_was_used_latest_stays() -> None:
    table = Table(1)
    device = MaskTables(VOCAB, "cpu", max_bytes=2 * 4 * WORDS)
    for row in (0, 1, 0, 2, 0):
        device.place([MaskRow(table, row)])
    assert table.reads == [0, 1, 2]
    device.place([MaskRow(table, 1)])
    assert table.reads == [0, 1, 2, 1]
    # Masks of one request for one step take room from rows, but give it back.
    device.place([np.zeros(WORDS, np.int32)] * 2)
    device.place([np.ones(WORDS, np.int32)] * 2)
    assert device.nbytes == 2 * 4 * WORDS


def test_a_row_that_is_not_filled_is_refused() -> None:
    """And what stood before it in the list does not count as uploaded."""
    table = Table(1)
    device = MaskTables(VOCAB, "cpu", max_bytes=4 * 4 * WORDS)
    for _ in range(10):
        private = np.arange(WORDS, dtype=np.int32)
        with pytest.raises(RuntimeError, match="row 9 of mask table 1 is not filled"):
            device.place([MaskRow(table, 3), private, MaskRow(table, 9)])
    found, rows = device.place([MaskRow(table, 3)])
    np.testing.assert_array_equal(found[rows].numpy(), table.rows[3:4])
    assert device.nbytes == 4 * 4 * WORDS


def test_the_masks_of_a_step_are_uploaded_from_where_they_were_filled() -> None:
    """What a GPU reads (private, since there may be none): the array itself if it is the rows of
    one in order, else a copy."""
    device = MaskTables(VOCAB, "cpu")
    array = device.new_masks(3, WORDS)
    array[:] = np.arange(3 * WORDS).reshape(3, WORDS)
    first, second, third = array
    assert device._staged([first, second, third]) is array
    short = np.ones(1, np.int32)
    for masks in ([third, second, first], [first, second], [first, first, first], [first, short]):
        staged = device._staged(masks)
        assert staged is not array
        np.testing.assert_array_equal(staged, [as_words(mask) for mask in masks])


@pytest.mark.parametrize("masked", [(0, 1, 2, 3), (1, 3), (2,), ()])
def test_masks_of_both_kinds_in_one_batch(masked: tuple[int, ...]) -> None:
    table = Table(2)
    kinds = [MaskRow(table, 0), np.array([5, -1], np.int32), MaskRow(table, 3), table.rows[8]]
    rows = [
        SampleRow(i, SamplingParams(), np.array([1]), 1, kinds[i] if i in masked else None)
        for i in range(4)
    ]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    edited = logits.clone()
    edit_logits(edited, rows, REFERENCE, MaskTables(VOCAB, "cpu"))
    for i in range(4):
        bits = np.ones(VOCAB, bool)
        if i in masked:
            packed = as_words(kinds[i]).view(np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[:VOCAB].astype(bool)
        expected = np.where(bits, logits[i].numpy(), -np.inf)
        np.testing.assert_array_equal(edited[i].numpy(), expected)
