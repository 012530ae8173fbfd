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
MAX_BANS = 64
"""Masks of bans that are kept from step to step."""


class HostMasks:
    """See `sampler.Constraints`. Rows have no automata: their states are masks already."""

    bans = True
    generation = 0
    tables: AutomatonTables | None = None

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._bans: dict[tuple[int, ...], Mask] = {}

    def of(self, row: SampleRow) -> Mask:
        """What the row's token is chosen from. The array must not be changed. Raises RuntimeError
        if a mask that has to be read is not filled."""
        banned = row.banned
        if not banned:
            return row.mask
        if row.mask is not None:
            return self._without(row.mask, banned)
        # The same few tokens (stop tokens) in all steps of a request.
        found = self._bans.get(banned)
        if found is None:
            if len(self._bans) >= MAX_BANS:
                self._bans.clear()
            found = self._bans[banned] = self._without(None, banned)
        return found

    def arrays(self, rows: Sequence[SampleRow], count: int) -> dict[str, np.ndarray]:
        words = self._words
        masks = [self.of(row) if row.banned else row.mask for row in rows]
        table = np.empty((max(len(rows), 1), words), np.int32)
        places = np.full(count, -1, np.int32)
        first: dict[int, int] = {}  # what several rows share stands in the table once
        for at, mask in enumerate(masks):
            if mask is None:
                continue
            places[at] = place = first.setdefault(id(mask), at)
            if place < at:
                continue
            found = words_of(mask)
            if len(found) == words:
                table[at] = found
            else:
                table[at, : len(found)] = found[:words]
                table[at, len(found) :] = 0  # nothing is allowed beyond its end
        return {"mask_table": table, "mask_row": places}

    def _without(self, mask: Mask, banned: Sequence[int]) -> Mask:
        banned = [token for token in banned if 0 <= token < self._vocab_size]
        if not banned:
            return mask
        if mask is None:
            found = np.full(self._words, -1, np.int32)
        else:
            found = np.zeros(self._words, np.int32)
            words = words_of(mask)[: self._words]
            found[: len(words)] = words
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
