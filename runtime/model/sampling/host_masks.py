"""Masks where kernels read main memory: where they lie, and those of a step as one table.

A row's banned tokens are taken out of its mask, which so says all that is forbidden in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from rootlace.kernels.interface import AutomatonTables
from rootlace.runtime.contracts.plan import MaskRow, SampleRow

Mask = np.ndarray | MaskRow | None
"""None: everything is allowed."""


class HostMasks:
    """See `sampler.Constraints`. Rows have no automata: their states are masks already."""

    bans = True
    generation = 0
    tables: AutomatonTables | None = None

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def arrays(self, rows: Sequence[SampleRow], count: int) -> dict[str, np.ndarray]:
        words = -(-self._vocab_size // 32)
        table = np.empty((max(len(rows), 1), words), np.int32)
        places = np.full(count, -1, np.int32)
        for at, row in enumerate(rows):
            mask = mask_of(row, self._vocab_size) if row.banned else row.mask
            if mask is None:
                continue
            found = words_of(mask)
            if len(found) == words:
                table[at] = found
            else:
                table[at, : len(found)] = found[:words]
                table[at, len(found) :] = 0  # nothing is allowed beyond its end
            places[at] = at
        return {"mask_table": table, "mask_row": places}


def mask_of(row: SampleRow, vocab_size: int) -> Mask:
    """What the row's token is chosen from, by its mask and its bans. Raises RuntimeError if a mask
    that has to be read is not filled."""
    banned = [token for token in row.banned if 0 <= token < vocab_size]
    if not banned:
        return row.mask
    words = -(-vocab_size // 32)
    if row.mask is None:
        found = np.full(words, -1, np.int32)
    else:
        found = np.zeros(words, np.int32)
        mask = words_of(row.mask)[:words]
        found[: len(mask)] = mask
    octets = found.view(np.uint8)
    for token in banned:
        octets[token >> 3] &= 0xFF ^ (1 << (token & 7))
    return found


def words_of(mask: np.ndarray | MaskRow) -> np.ndarray:
    """int32: the mask's words. Raises RuntimeError if it is a row of a table and not filled."""
    if not isinstance(mask, MaskRow):
        return mask
    table = mask.table
    if not (mask.address or table.filled(mask.row)):
        raise RuntimeError(f"row {mask.row} of mask table {table.key} is not filled")
    return table.rows[mask.row]


def addresses_of(masks: Sequence[Mask], vocab_size: int) -> tuple[array[int], list[np.ndarray]]:
    """Where the masks lie, int64, 0 where everything is allowed; empty if it is everywhere. The
    arrays are to be kept as long as the addresses are read."""
    found = [mask.address if type(mask) is MaskRow else 0 for mask in masks]
    kept: list[np.ndarray] = []
    if 0 in found:
        words = -(-vocab_size // 32)
        for at, mask in enumerate(masks):
            if mask is None or found[at]:
                continue
            whole = np.ascontiguousarray(words_of(mask))
            if len(whole) < words:  # nothing is allowed beyond its end
                whole = np.pad(whole, (0, words - len(whole)))
            kept.append(whole)
            found[at] = whole.ctypes.data
    return array("q", found if any(found) else ()), kept
