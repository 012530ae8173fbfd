"""Finds what followed the last tokens of a request before, in any text of its namespace.

text 7   ... the cat sat on the mat and slept ...      grams of 2, 4 and 16 tokens -> 7, place
request  ... where it sat on the mat                   "sat on the mat" -> text 7, goes on "and"
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Hashable
from operator import mul

import numpy as np

GRAMS = (2, 4, 16)
"""Lengths of the suffixes that are looked up, in tokens: powers of two.

Two tokens are right in half of the cases where a request repeats what it read, and the next one is
known sooner; where they are not, nothing is drafted of them (`scheduler.drafter.Rates`).
"""
LONGEST = GRAMS[-1]
_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_POWERS = tuple(pow(_BASE, at, 1 << 64) for at in range(LONGEST))
_PLACES_PER_TOKEN = 4
"""Table entries per token: three grams, and room between them."""
_PROBED = 64
"""Distance of the places of a prompt that tell whether the index has the prompt already."""
_BYTES_PER_ENTRY = 8


class IndexedText:
    """Tokens `ids[:end]` (int32) of one request, as far as no text before had them.

    `owner` is whose request it was: nobody else is told anything of it.
    """

    __slots__ = ("end", "first", "ids", "number", "owner", "salts")

    def __init__(self, owner: Hashable, number: int) -> None:
        self.owner = owner
        self.salts = _salts(owner)
        self.number = number
        """The text's number in the index; 0: the index has dropped the text."""
        self.first = 0
        """Place in the request of `ids[0]`."""
        self.ids = np.empty(0, np.int32)
        self.end = 0

    def append(self, tokens: np.ndarray) -> None:
        end = self.end + len(tokens)
        if end > len(self.ids):
            self.ids = np.concatenate((self.ids[: self.end], np.empty(end, np.int32)))
        self.ids[self.end : end] = tokens
        self.end = end


class SuffixIndex:
    """The latest place behind every gram of at most `capacity` tokens of recent texts.

    A hash table without lists of places: of two grams with the same entry the later one stays. An
    entry is checked against its text when it is read, so it may be stale but never wrong. The
    texts used least recently are dropped first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._texts: OrderedDict[int, IndexedText] = OrderedDict()
        self._numbers = 0
        bits = max((_PLACES_PER_TOKEN * capacity - 1).bit_length(), 4)
        self._shift = 64 - bits
        self._table = np.zeros(1 << bits, np.uint64)
        """IndexedText's number << 32 | place behind the gram; 0: nothing."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the table and, at most, of the texts."""
        return len(self._table) * _BYTES_PER_ENTRY + 2 * 4 * self.capacity

    # ------------------------------------------------------------ learning

    def open(self, owner: Hashable, tokens: np.ndarray) -> IndexedText:
        """Start a text with a request's `tokens` (int32), but for what the index knows already."""
        self._numbers += 1
        text = IndexedText(owner, self._numbers)
        text.first = first = max(self._known(text, tokens) - LONGEST, 0)
        self._texts[text.number] = text
        self.learn(text, tokens[first:])
        return text

    def learn(self, text: IndexedText, tokens: np.ndarray) -> None:
        """Append `tokens` (int32) to a text, and index the grams behind which a token is known."""
        if not text.number or not len(tokens):
            return
        # The last gram of what was there has its next token now.
        start = max(text.end - LONGEST, 0)
        fresh = max(text.end, 1) - start
        text.append(tokens)
        self.tokens += len(tokens)
        self._texts.move_to_end(text.number)
        hashes = _rolling(text.ids[start : text.end - 1])
        count = hashes.shape[1]
        hashes ^= np.array(text.salts, np.uint64)[:, None]
        hashes *= np.uint64(_BASE)
        hashes >>= np.uint64(self._shift)
        entries = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
        entries |= np.uint64(text.number << 32)
        for size, slots in zip(GRAMS, hashes, strict=True):
            # `slots[i]` is of the gram that ends behind token i; short ones are no grams.
            low = max(fresh, size) - 1
            self._table[slots[low:]] = entries[low:]
        while self.tokens > self.capacity:
            self._drop(next(iter(self._texts.values())))

    def forget(self, owner: Hashable) -> None:
        """Drop all texts of an owner."""
        for text in self.texts():
            if text.owner == owner:
                self._drop(text)

    def clear(self) -> None:
        """Drop all texts."""
        for text in self.texts():
            self._drop(text)
        self._table[:] = 0

    def texts(self) -> list[IndexedText]:
        """The texts, those used least recently first."""
        return list(self._texts.values())

    def _drop(self, text: IndexedText) -> None:
        del self._texts[text.number]
        self.tokens -= text.end
        text.number = 0
        text.end = 0
        text.ids = text.ids[:0]

    # ------------------------------------------------------------ looking up

    def find(
        self, own: IndexedText, tokens: np.ndarray, length: int
    ) -> tuple[IndexedText, int, int] | None:
        """What once followed the end of `tokens[:length]`, of the request of the text `own`.

        A text, the place there, and which of `GRAMS` agreed; None if nothing is known.
        """
        recent = tokens[max(length - LONGEST, 0) : length].tolist()
        if len(recent) < GRAMS[0]:
            return None
        products = list(map(mul, recent[::-1], _POWERS))
        hashed, at, slots = 0, 0, []
        for size, salt in zip(GRAMS, own.salts, strict=True):
            if size > len(recent):
                break
            hashed += sum(products[at:size])
            at = size
            slots.append((((hashed & _MASK) ^ salt) * _BASE & _MASK) >> self._shift)
        for rank in range(len(slots) - 1, -1, -1):
            entry = self._table.item(slots[rank])
            text = self._texts.get(entry >> 32)
            if text is None or text.owner != own.owner:
                continue
            size, place = GRAMS[rank], entry & 0xFFFFFFFF
            if (
                size <= place < text.end
                and text.ids[place - size : place].tolist() == recent[-size:]
            ):
                self._texts.move_to_end(text.number)
                return text, place, rank
        return None

    def _known(self, own: IndexedText, tokens: np.ndarray) -> int:
        """How far the beginning of `tokens` is known, by a gram in each stretch of it."""
        ends = np.arange(_PROBED, len(tokens), _PROBED)
        if not len(ends):
            return 0
        grams = tokens[ends[:, None] - np.arange(1, LONGEST + 1)]  # the last token first
        hashed = (grams.astype(np.uint64) * np.array(_POWERS, np.uint64)).sum(1, dtype=np.uint64)
        hashed ^= np.uint64(own.salts[-1])
        hashed *= np.uint64(_BASE)
        entries = self._table[hashed >> np.uint64(self._shift)].tolist()
        known = 0
        for end, entry, gram in zip(ends.tolist(), entries, grams, strict=True):
            text, place = self._texts.get(entry >> 32), entry & 0xFFFFFFFF
            if text is None or text.owner != own.owner or not LONGEST <= place <= text.end:
                break
            if not np.array_equal(text.ids[place - LONGEST : place], gram[::-1]):
                break
            self._texts.move_to_end(text.number)
            known = end
        return known


def _salts(owner: Hashable) -> tuple[int, ...]:
    """A number per length of `GRAMS`, of an owner: the same in every process."""
    return tuple(zlib.crc32(f"{size} {owner}".encode()) * _BASE & _MASK for size in GRAMS)


def _rolling(tokens: np.ndarray) -> np.ndarray:
    """Hashes [grams, tokens] (uint64) of the grams that end behind each token.

    The first ones of each length miss tokens that would be before the first.
    """
    found, size, row = tokens.astype(np.uint64), 1, 0
    hashes = np.empty((len(GRAMS), len(tokens)), np.uint64)
    while size < LONGEST:
        longer = found.copy()
        longer[size:] += found[:-size] * np.uint64(_POWERS[size])
        found, size = longer, 2 * size
        if size in GRAMS:
            hashes[row], row = found, row + 1
    return hashes
