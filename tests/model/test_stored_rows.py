"""Rows of an embedding that stays in a GGUF file: the numbers of the whole, in little memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rootlace.kernels.reference.layers import dequantise
from rootlace.runtime.model.checkpoint.quantised.reading import QUANTISED
from rootlace.runtime.model.checkpoint.weights import Blocks
from rootlace.runtime.model.decoder.native_weights import StoredRows
from rootlace.runtime.model.gguf.file import TYPES

BYTES = {kind.name: kind.bytes for kind in TYPES.values()}
VOCAB = 96


def _blocks(kind: str) -> Blocks:
    made = torch.Generator().manual_seed(3)
    shape = (VOCAB, 2, BYTES[kind])
    return Blocks(kind, torch.randint(0, 60, shape, dtype=torch.uint8, generator=made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(QUANTISED))
def test_rows_are_those_of_the_whole(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens at a time, as many as the table holds, more, and those that it forgot."""
    monkeypatch.setattr(StoredRows, "ROWS", 8)
    blocks = _blocks(kind)
    whole = dequantise(QUANTISED[kind](blocks.data)).to(dtype)
    rows = StoredRows(blocks, dtype)
    random = np.random.default_rng(5)
    for count in (1, 1, 3, 8, 1, 40, 2, 96, 7, 0, 5):
        asked = random.integers(0, VOCAB, count).astype(np.int32)
        places = rows.places(asked)
        assert places.dtype == np.int32 and places.shape == asked.shape
        assert torch.equal(rows.table[places.astype(np.int64)], whole[asked.astype(np.int64)])


def test_what_was_asked_for_lately_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, read = _blocks("Q8_0"), list[int]()
    own = QUANTISED["Q8_0"]

    def counted(data: torch.Tensor) -> object:
        read.append(len(data))
        return own(data)

    monkeypatch.setitem(QUANTISED, "Q8_0", counted)  # type: ignore[arg-type]
    rows = StoredRows(blocks, torch.float32)
    read.clear()
    for asked in ([1, 2, 2], [2, 1], [3, 1], [3]):
        rows.places(np.array(asked, np.int32))
    assert read == [2, 1]


def test_rows_are_read_in_any_mode() -> None:
    """A table that a start made in inference mode is filled outside of it, too."""
    with torch.inference_mode():
        rows = StoredRows(_blocks("Q8_0"), torch.float32)
    rows.places(np.array([4], np.int32))
    with torch.inference_mode():
        rows.places(np.arange(5, dtype=np.int32))
