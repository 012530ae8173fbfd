"""Token masks on the device: rows of tables that requests share stay there between steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from rootlace.runtime.contracts.plan import MaskRow

MAX_BYTES = 64 << 20
"""Masks kept on the device, unless one step alone has more."""
_FIRST_SLOTS = 32


class MaskTables:
    """One tensor of packed masks, whichever tables they come from, so that one operation masks all
    rows of a step.

    A row of a table is uploaded when it is first used; rows not used for longest make room. Masks
    that belong to one request are uploaded for one step. Not thread-safe.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, max_bytes: int = MAX_BYTES
    ) -> None:
        self._words = -(-vocab_size // 32)
        self._device = torch.device(device)
        self._max_slots = max(max_bytes // (4 * self._words), 1)
        self._masks = torch.empty((0, self._words), dtype=torch.int32, device=self._device)
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()  # least recently used first
        self._private: list[int] = []
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        return self._masks.nbytes

    def new_masks(self, rows: int, words: int) -> np.ndarray:
        """int32 [rows, words], uninitialised, for the masks of a step: a GPU reads it by itself."""
        if self._device.type != "cuda":
            return np.empty((rows, words), np.int32)
        array: np.ndarray = torch.empty((rows, words), dtype=torch.int32, pin_memory=True).numpy()
        return array

    def place(self, masks: Sequence[np.ndarray | MaskRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, rows): table int32 [N, ceil(vocab_size / 32)] on the device, of which row
        `rows[i]` (int64 [len(masks)]) is mask i; good until the next call.

        A mask of fewer words allows nothing beyond its end. Raises RuntimeError if a row of a
        table is not filled.
        """
        self._free += self._private
        self._private = []
        slots = self._slots
        found: list[int] = []
        fresh: list[tuple[int, np.ndarray]] = []
        new: dict[tuple[int, int], int] = {}
        try:
            for mask in masks:
                if not isinstance(mask, MaskRow):
                    slot = self._take_slot(masks)
                    self._private.append(slot)
                    fresh.append((slot, mask))
                elif (key := (mask.table.key, mask.row)) in slots:
                    slot = slots[key]
                    slots.move_to_end(key)
                elif key in new:
                    slot = new[key]
                else:
                    words = words_of(mask)
                    slot = new[key] = self._take_slot(masks)
                    fresh.append((slot, words))
                found.append(slot)
            if fresh:
                self._upload(fresh)
        except BaseException:
            self._free += new.values()
            raise
        slots.update(new)
        return self._masks, torch.from_numpy(np.array(found)).to(self._device)

    def _take_slot(self, masks: Sequence[np.ndarray | MaskRow]) -> int:
        """A slot that none of `masks`, those of this step, has."""
        if not self._free:
            count = len(self._masks)
            if count >= self._max_slots:
                keep = {(mask.table.key, mask.row) for mask in masks if isinstance(mask, MaskRow)}
                oldest = next((key for key in self._slots if key not in keep), None)
                if oldest is not None:
                    return self._slots.pop(oldest)
            capacity = max(2 * count, _FIRST_SLOTS)
            if count < self._max_slots:
                capacity = min(capacity, self._max_slots)
            grown = self._masks.new_empty((capacity, self._words))
            grown[:count] = self._masks
            self._masks = grown
            self._free = list(range(capacity - 1, count - 1, -1))
        return self._free.pop()

    def _upload(self, fresh: list[tuple[int, np.ndarray]]) -> None:
        """Write masks to their slots."""
        if self._device.type == "cpu":
            host = self._masks.numpy()
            for slot, words in fresh:
                _write(host[slot], words)
            return
        staged = torch.from_numpy(self._staged([words for _, words in fresh]))
        slots = torch.tensor([slot for slot, _ in fresh], device=self._device)
        self._masks.index_copy_(0, slots, staged.to(self._device, non_blocking=True))

    def _staged(self, masks: list[np.ndarray]) -> np.ndarray:
        """The masks as one array, for one upload: the array whose rows they are, or a copy."""
        whole = masks[0].base
        if (
            isinstance(whole, np.ndarray)
            and whole.shape == (len(masks), self._words)
            and all(
                mask.ctypes.data == row.ctypes.data for mask, row in zip(masks, whole, strict=True)
            )
        ):
            return whole
        staged = self.new_masks(len(masks), self._words)
        for row, words in zip(staged, masks, strict=True):
            _write(row, words)
        return staged


def allows(mask: np.ndarray | MaskRow, token: int) -> bool:
    """Whether `mask` allows `token` (not negative).

    Raises RuntimeError if it is a row of a table and not filled.
    """
    words = words_of(mask)
    word = token >> 5
    return word < len(words) and bool(words.item(word) >> (token & 31) & 1)


def allowed_ids(mask: np.ndarray | MaskRow, vocab_size: int) -> np.ndarray:
    """int64: the tokens that `mask` allows, ascending; of `words_of`'s errors."""
    # Words are missing where the mask allows nothing.
    bits = words_of(mask).view(np.uint8)
    kept = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little")
    return np.flatnonzero(kept.view(bool))


def words_of(mask: np.ndarray | MaskRow) -> np.ndarray:
    """int32: the mask's words. Raises RuntimeError if it is a row of a table and not filled."""
    if not isinstance(mask, MaskRow):
        return mask
    table = mask.table
    if not table.filled(mask.row):
        raise RuntimeError(f"row {mask.row} of mask table {table.key} is not filled")
    return table.rows[mask.row]


def _write(row: np.ndarray, words: np.ndarray) -> None:
    count = len(words)
    if count >= len(row):
        row[:] = words[: len(row)]
    else:
        row[:count] = words
        row[count:] = 0
