"""Finds what followed the last tokens of a request before, in any text of its namespace.

text 7   ... the cat sat on the mat and slept ...      grams of 2, 4 and 16 tokens -> 7, place
request  ... where it sat on the mat                   "sat on the mat" -> text 7, goes on "and"
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b
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
"""Table entries per token of the capacity: three grams, and room between them."""
_PLACES_WHILE_FEW = 32
"""Table entries per known token, up to the table's full size: the table grows with what is known,
for few servers ever know as much as the capacity."""
_FEWEST_BITS = 16
"""Bits of the table's size at first."""
_PROBED = 64
"""Distance of the places of a prompt that tell whether the index has the prompt already."""
_LEAST_TOKENS = 64
"""Tokens that a text has at least for the index to have as many texts as fit."""
_TEXT_BYTES = 600
"""Bytes of a text beside its tokens."""
_JOINED = 64
"""Texts that wait to be indexed at most."""
_MAX_NUMBER = (1 << 32) - 1
_NO_TOKENS = np.empty(0, np.int32)


class Owner:
    """Owner of the texts in `texts`, from which no other owner gets drafts.

    `salts`: a number per length of `GRAMS`. Without the key of the index, no user can tell which
    grams of two owners share an entry of the table.
    """

    __slots__ = ("__weakref__", "name", "salts", "texts")

    def __init__(self, name: Hashable, key: bytes) -> None:
        self.name = name
        self.salts = tuple(
            int.from_bytes(blake2b(f"{size} {name!r}".encode(), digest_size=8, key=key).digest())
            for size in GRAMS
        )
        self.texts: dict[int, IndexedText] = {}


@dataclass(slots=True, eq=False)
class IndexedText:
    """Tokens `ids[:end]` (int32) of one request, without tokens that an earlier text had."""

    owner: Owner
    number: int
    """The text's number in the index; 0: the index has dropped the text."""
    known: int
    """Number of the request's first tokens that the index has."""
    ids: np.ndarray
    end: int = 0


class SuffixIndex:
    """The latest place behind every gram of at most `capacity` tokens of recent texts.

    A hash table without lists of places: of two grams with the same entry the later one stays,
    whoever owns it. An entry is checked against its text when it is read, so it may be stale but
    never wrong. The texts used least recently are dropped first.
    """

    def __init__(self, capacity: int, key: bytes = b"") -> None:
        """`key`: a secret of the process where owners must not learn of each other."""
        self.capacity = capacity
        self.tokens = 0
        self._key = key
        self._max_texts = max(capacity // _LEAST_TOKENS, 1)
        self._owners: dict[Hashable, Owner] = {}
        self._texts: OrderedDict[int, IndexedText] = OrderedDict()
        self._numbers = 0
        self._most_bits = max((_PLACES_PER_TOKEN * capacity - 1).bit_length(), 4)
        self._fresh: list[tuple[IndexedText, int, int]] = []
        """Texts with grams that are not in the table yet: text, place behind the first of these
        grams, end of the text. Tables of many short texts are cheaper together."""
        self._begin_table()

    def _begin_table(self) -> None:
        bits = min(self._most_bits, _FEWEST_BITS)
        self._shift = 64 - bits
        self._table = np.zeros(1 << bits, np.uint64)
        """Text's number << 32 | place behind the gram; 0: nothing."""

    @property
    def num_bytes(self) -> int:
        """Upper bound of the bytes of table and texts."""
        return self._table.nbytes + 2 * 4 * self.tokens + _TEXT_BYTES * len(self._texts)

    @property
    def owners(self) -> list[Hashable]:
        """The names of all owners of a text."""
        return list(self._owners)

    # ------------------------------------------------------------ learning

    def open(self, owner: Hashable, tokens: np.ndarray) -> IndexedText:
        """Start a text with a request's `tokens` (int32), without tokens that the index knows
        already. Keep the last tokens, up to half of the capacity: no request takes all of the
        index."""
        if self._numbers == _MAX_NUMBER:
            self.clear()
            self._numbers = 0
        self._numbers += 1
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = Owner(owner, self._key)
        count = self._known(known, tokens) if len(tokens) > _PROBED else 0
        first = max(count - LONGEST, len(tokens) - self.capacity // 2, 0)
        text = IndexedText(known, self._numbers, first, _NO_TOKENS)
        known.texts[text.number] = self._texts[text.number] = text
        self.learn(text, tokens[first:])
        return text

    def learn(self, text: IndexedText, tokens: np.ndarray) -> None:
        """Append `tokens` (int32) to a text. The next lookup finds what follows its grams."""
        while len(self._texts) > self._max_texts:
            self._drop(next(iter(self._texts.values())))
        if not text.number or not len(tokens):
            return
        end = text.end + len(tokens)
        # The last gram of what was there has its next token now.
        self._fresh.append((text, max(text.end, 1), end))
        if end > len(text.ids):
            text.ids = np.concatenate((text.ids[: text.end], np.empty(end, np.int32)))
        text.ids[text.end : end] = tokens
        text.end = end
        text.known += len(tokens)
        self.tokens += len(tokens)
        self._texts.move_to_end(text.number)
        while self.tokens > self.capacity:
            self._drop(next(iter(self._texts.values())))
        if len(self._fresh) == _JOINED:
            self._index()

    def _index(self) -> None:
        """Enter the grams of learnt tokens, those of all texts at once: texts are often short."""
        bits = min((_PLACES_WHILE_FEW * self.tokens - 1).bit_length(), self._most_bits)
        if (more := bits - (64 - self._shift)) > 0:
            # An entry stays in all places that the longer hash of its gram may name. Where another
            # gram is looked up there, the text tells.
            self._table = np.repeat(self._table, 1 << more)
            self._shift -= more
        parts, rows = [], []
        for text, fresh, end in self._fresh:
            start = max(fresh - LONGEST, 0)
            if text.number and end - 1 > start:
                parts.append(text.ids[start : end - 1])
                rows.append((end - 1 - start, start, fresh, text.number << 32, *text.owner.salts))
        self._fresh = []
        if not parts:
            return
        columns = np.array(rows, np.uint64).T
        lengths = columns[0].astype(int)
        starts, firsts, numbers, *salts = columns[1:].repeat(lengths, 1)
        # Hashes of the grams that end behind each token: of 2 tokens, 4, 8 and 16.
        sums, hashes = np.concatenate(parts).astype(np.uint64), []
        for size in (1, 2, 4, 8):
            longer = sums.copy()
            longer[size:] += sums[:-size] * np.uint64(_POWERS[size])
            sums = longer
            if 2 * size in GRAMS:
                hashes.append(sums)
        # `entries[i]` is the place behind token i of the texts' ends that were joined.
        counts = np.arange(1, len(sums) + 1, dtype=np.uint64)
        counts -= (columns[0].cumsum() - columns[0]).repeat(lengths)
        entries = counts + starts
        new = entries >= firsts
        entries |= numbers
        for size, slots, salt in zip(GRAMS, hashes, salts, strict=True):
            slots ^= salt
            slots *= np.uint64(_BASE)
            slots >>= np.uint64(self._shift)
            grams = new & (counts >= size)  # fewer tokens are no gram
            self._table[slots[grams]] = entries[grams]

    def forget(self, owner: Hashable) -> None:
        """Drop all texts of an owner."""
        known = self._owners.get(owner)
        for text in list(known.texts.values()) if known is not None else ():
            self._drop(text)

    def clear(self) -> None:
        """Drop all texts."""
        for owner in self.owners:
            self.forget(owner)
        self._fresh = []
        self._begin_table()

    def _drop(self, text: IndexedText) -> None:
        del self._texts[text.number], text.owner.texts[text.number]
        if not text.owner.texts:
            del self._owners[text.owner.name]
        self.tokens -= text.end
        text.number = 0
        text.end = 0
        text.ids = _NO_TOKENS

    # ------------------------------------------------------------ looking up

    def find(
        self, asking: IndexedText, tokens: np.ndarray, length: int
    ) -> tuple[IndexedText, int, int] | None:
        """Find an earlier continuation of `tokens[:length]`, of the request of the text `asking`.
        Returns a text, the place there, and the index in `GRAMS` that agreed; None if nothing is
        known."""
        if self._fresh:
            self._index()
        recent = tokens[max(length - LONGEST, 0) : length].tolist()
        if len(recent) < GRAMS[0]:
            return None
        products = list(map(mul, recent[::-1], _POWERS))
        hashed, at, slots = 0, 0, []
        for size, salt in zip(GRAMS, asking.owner.salts, strict=True):
            if size > len(recent):
                break
            hashed += sum(products[at:size])
            at = size
            slots.append((((hashed & _MASK) ^ salt) * _BASE & _MASK) >> self._shift)
        for rank in range(len(slots) - 1, -1, -1):
            entry = self._table.item(slots[rank])
            text = self._texts.get(entry >> 32)
            if text is None or text.owner is not asking.owner:
                continue
            size, place = GRAMS[rank], entry & 0xFFFFFFFF
            if (
                size <= place < text.end
                and text.ids[place - size : place].tolist() == recent[-size:]
            ):
                self._texts.move_to_end(text.number)
                return text, place, rank
        return None

    def _known(self, owner: Owner, tokens: np.ndarray) -> int:
        """Count the first tokens of `tokens` that are known, by a gram in each stretch."""
        if self._fresh:
            self._index()
        ends = np.arange(_PROBED, len(tokens), _PROBED)
        grams = tokens[ends[:, None] - np.arange(1, LONGEST + 1)]  # the last token first
        hashed = (grams.astype(np.uint64) * np.array(_POWERS, np.uint64)).sum(1, dtype=np.uint64)
        hashed ^= np.uint64(owner.salts[-1])
        hashed *= np.uint64(_BASE)
        entries = self._table[hashed >> np.uint64(self._shift)]
        numbers, places = entries >> np.uint64(32), (entries & np.uint64(_MAX_NUMBER)).astype(int)
        count = 0
        while count < len(ends):  # one text after the other, as far as it goes
            text = owner.texts.get(int(numbers[count]))
            if text is None:
                break
            there = (numbers[count:] == numbers[count]) & (places[count:] >= LONGEST)
            there &= places[count:] <= text.end
            end = count + (len(there) if there.all() else int(there.argmin()))
            same = text.ids[places[count:end, None] - np.arange(1, LONGEST + 1)] == grams[count:end]
            right = same.all(1)
            passed = len(right) if right.all() else int(right.argmin())
            if not passed:
                break
            self._texts.move_to_end(text.number)
            count += passed
        return int(ends[count - 1]) if count else 0
