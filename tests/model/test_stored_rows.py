"""Rows of an embedding that stays in a GGUF file: the numbers of the whole, in little memory."""

from typing import Any

import gguf
import numpy as np
import pytest

from rootlace.kernels.native import library as native
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime.model.checkpoint.quantised.blocks import READERS, BlockCodes
from rootlace.runtime.model.checkpoint.weights import Blocks
from rootlace.runtime.model.decoder.native_weights import PackedWeights, StoredRows
from rootlace.runtime.model.gguf.file import TYPES

BYTES = {kind.name: kind.bytes for kind in TYPES.values()}
VOCAB = 96


def _blocks(kind: str) -> Blocks:
    data = np.random.default_rng(3).integers(0, 60, (VOCAB, 2, BYTES[kind]), np.uint8)
    return Blocks(kind, data)


def _rows(blocks: Blocks, dtype: np.dtype[Any]) -> StoredRows:
    found = StoredRows.of(PackedWeights({}, {}, blocks), dtype, native.load())
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", sorted(READERS))
def test_rows_are_those_of_the_whole(
    kind: str, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens at a time, as many as the table holds, more, and those that it forgot. Against
    what the `gguf` package makes of the blocks."""
    monkeypatch.setattr(StoredRows, "ROWS", 8)
    blocks = _blocks(kind)
    whole = gguf.dequantize(blocks.data.reshape(VOCAB, -1), gguf.GGMLQuantizationType[kind])
    whole = whole.astype(dtype)
    rows = _rows(blocks, dtype)
    random = np.random.default_rng(5)
    for count in (1, 1, 3, 8, 1, 40, 2, 96, 7, 0, 5):
        asked = random.integers(0, VOCAB, count).astype(np.int32)
        places = rows.places(asked)
        assert places.dtype == np.int32 and places.shape == asked.shape
        assert rows.table.dtype == dtype
        assert np.array_equal(rows.table[places], whole[asked])


def test_what_was_asked_for_lately_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, read = _blocks("Q8_0"), list[int]()
    own = READERS["Q8_0"]

    def counted(data: np.ndarray) -> BlockCodes:
        read.append(len(data))
        return own(data)

    monkeypatch.setitem(READERS, "Q8_0", counted)
    rows = _rows(blocks, FLOAT32)
    read.clear()
    for asked in ([1, 2, 2], [2, 1], [3, 1], [3]):
        rows.places(np.array(asked, np.int32))
    assert read == [2, 1]
