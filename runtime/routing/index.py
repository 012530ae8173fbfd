"""The prefixes in the caches of all replicas: digest -> set of replicas.

digest of "You are a poet"  -> {0, 2}      a holder of a prefix holds all shorter prefixes
digest of "You are a"       -> {0, 1, 2}
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from rootlace.runtime.cache.journal import Change

# Sets of replicas ---------------------------------------------------------------------------------


MOST_SETS = 1 << 18
"""At 1,000 replicas these sets take 90 MB."""


class HolderSets:
    """Sets of replicas as bits of integers, each stored once under a number.

    A number is valid while entries use it; the empty set is always 0. Blocks of one prompt mostly
    have the same holders, so there are far fewer sets than blocks.
    """

    def __init__(self, limit: int = MOST_SETS) -> None:
        self.bits = [0]
        """Set by number."""
        self._limit = limit
        self._numbers = {0: 0}
        self._uses = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, bits: int) -> int | None:
        """Return the number of a set, to be counted at once; None if there are too many sets."""
        number = self._numbers.get(bits)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.bits[number] = bits
            elif len(self.bits) < self._limit:
                number = len(self.bits)
                self.bits.append(bits)
                self._uses.append(0)
            else:
                return None
            self._numbers[bits] = number
        return number

    def count(self, number: int, uses: int) -> None:
        """Count `uses` more uses of a set (fewer below 0); an unused set is forgotten."""
        if not number:
            return
        self._uses[number] += uses
        if not self._uses[number]:
            del self._numbers[self.bits[number]]
            self.bits[number] = 0
            self._free.append(number)

    def with_any(self, replicas: int) -> np.ndarray:
        """bool by every possible number: whether the set contains any of `replicas` (bits).

        Later sets contain none, unless such a set is asked for.
        """
        marks = np.zeros(self._limit, bool)
        marks[: len(self.bits)] = [bool(bits & replicas) for bits in self.bits]
        return marks


# Index --------------------------------------------------------------------------------------------


MOST_ENTRIES = 10_000_000
_WIDTH = 16
"""Slots of a bucket; a full table fills half of them, so hardly any bucket overflows."""
_FEWEST = 1 << 10
"""Buckets of a small table, in which no bucket overflows."""
_LOOKS = 64
"""Digests of a prompt looked up at most."""
_NONE = np.empty(0, np.uint64)
_SWEPT = 1 << 12
"""Buckets swept in less than a millisecond."""
_MOST_NEWS = 1 << 12
"""Digests of waiting reports above which the reports enter the table without a lookup."""


class _News(NamedTuple):
    """Digests that `replica` told and the table lacks: of prefixes held now, or of removed ones."""

    replica: int
    held: bool
    digests: np.ndarray


class PrefixIndex:
    """Prefix digest (uint64) -> replicas that hold the prefix.

    A replica that holds a prefix holds all shorter ones, too. At most `limit` prefixes are known;
    further ones are ignored until others go. The table has a bucket of slots for each few digests,
    allocated once: 24 bytes for each of `limit` (the system commits used pages only), plus
    `HolderSets`. So the index never pauses to grow or to rehash. Reports are collected
    until the next look, and written together: a write costs about the same for one digest as for
    many.
    """

    def __init__(self, limit: int = MOST_ENTRIES) -> None:
        buckets = max(2 * limit // _WIDTH, _FEWEST) | 1
        self._buckets = buckets
        self._keys = np.zeros(buckets * _WIDTH, np.uint64)
        """Digests by slot; 0 where a slot is free."""
        self._rows = self._keys.reshape(buckets, _WIDTH)
        self._sets = np.zeros(buckets * _WIDTH, np.uint32)
        """Set numbers by slot; 0 where a slot is free."""
        # A single lookup costs less through a memoryview.
        self._raw = self._keys.data.cast("B")
        self._numbers = self._sets.data
        self._holders = HolderSets()
        self._limit = limit
        self._known = 0
        self._heard = 0
        """Replicas (bits) that may hold a prefix."""
        self._dropped = 0
        """Replicas (bits) with void entries, which are being removed."""
        self._left: dict[int, int] = {}
        """Replica -> buckets that may still have void entries."""
        self._next = 0
        """The next bucket to sweep; the first follows the last."""
        self._gone = np.empty(0, bool)
        """By number of a set: whether the set had a void replica."""
        self._news: list[_News] = []
        """Reports not in the table yet, oldest first."""
        self._later: list[_News] = []
        """Reports of void replicas, which enter the table once their old entries have left."""
        self._count = self._count_later = 0
        """Counts of digests in these reports."""

    def __len__(self) -> int:
        self._settle()
        return self._known

    def entries(self) -> dict[int, int]:
        """Return all entries: digest -> replicas (bits). O(size of the table)."""
        self._settle()
        slots = self._sets.nonzero()[0]
        sets = self._sets[slots].tolist()
        held = [self._holders.bits[number] & ~self._dropped for number in sets]
        return dict(zip(self._keys[slots].tolist(), held, strict=True))

    def apply(self, replica: int, change: Change) -> None:
        """Take in a replica's report on its cache."""
        if change.fresh:
            self.drop(replica)
        void = self._dropped >> replica & 1
        for held, digests in ((False, change.removed), (True, change.added)):
            if len(digests):
                (self._later if void else self._news).append(_News(replica, held, digests))
        count = len(change.removed) + len(change.added)
        if void:
            self._count_later += count
        else:
            self._count += count
        while self._count_later > self._limit:  # as many digests as the table may have
            self.sweep()
        if self._count > _MOST_NEWS:
            self._settle()

    def add(self, replica: int, digests: np.ndarray) -> None:
        """Add a replica to `digests`, each given once."""
        self.apply(replica, Change(digests, _NONE))

    def drop(self, replica: int) -> None:
        """Void all entries of a replica, from now on.

        In a large table the entries stay until `sweep` was called often enough.
        """
        bit = 1 << replica
        self._divide(one for one in self._news + self._later if one.replica != replica)
        if not self._heard & bit:
            return
        self._heard &= ~bit
        self._dropped |= bit
        self._left[replica] = self._buckets
        self._gone = self._holders.with_any(self._dropped)
        if self._buckets <= _SWEPT:
            self.sweep()

    def sweep(self) -> bool:
        """Remove some void entries; return whether some are left."""
        if not self._dropped:
            return False
        first, last = self._next, min(self._next + _SWEPT, self._buckets)
        slots = self._gone[self._sets[first * _WIDTH : last * _WIDTH]].nonzero()[0]
        slots += first * _WIDTH
        self._change(slots)
        self._free(slots)
        self._next = last % self._buckets
        for replica in list(self._left):
            self._left[replica] -= last - first
            if self._left[replica] <= 0:
                del self._left[replica]
                self._dropped &= ~(1 << replica)
                self._divide(self._news + self._later)
        return bool(self._dropped)

    def match(self, digests: np.ndarray) -> list[tuple[int, int]]:
        """Return the numbers of digests that replicas hold: (count, replicas as bits), fewest
        first.

        `digests` (uint64) are of a prompt's prefixes, the shortest first. Replicas with none are
        left out. Costs O(log) lookups for each different count, of which there are few, the longest
        prefixes first. The total is bounded: beyond it some replicas are reported with fewer.
        """
        return self.longest(digests.item, len(digests))

    def longest(
        self, digest: Callable[[int], int], end: int, first: int = 0, among: int = -1
    ) -> list[tuple[int, int]]:
        """`match` among replicas `among` (bits), prefixes `first` to `end`, with `digest(at)`."""
        self._settle()
        seen: dict[int, int] = {}
        """Block number -> holders looked up."""
        ends: list[tuple[int, int]] = []
        left = among & ~self._dropped

        def others(at: int) -> int:
            holders = seen.get(at)
            if holders is None:
                holders = seen[at] = self._holders_of(digest(at))
            return holders if left == -1 else holders & left

        while end > first and len(seen) < _LOOKS and others(first):
            # The longest prefix held by a replica of which no longer one is known.
            low, high = first + 1, end
            while low < high:
                middle = (low + high + 1) // 2
                if others(middle - 1):
                    low = middle
                else:
                    high = middle - 1
            ends.append((low, others(low - 1)))
            left &= ~ends[-1][1]
            end = low - 1
        for at in sorted(seen, reverse=True) if len(seen) >= _LOOKS else ():
            if rest := others(at):
                ends.append((at + 1, rest))
                left &= ~rest
        return sorted(ends)

    def _holders_of(self, digest: int) -> int:
        first = digest % self._buckets * _WIDTH
        row = self._raw[8 * first : 8 * (first + _WIDTH)].tobytes()
        key = digest.to_bytes(8, sys.byteorder)
        at = row.find(key)
        while at > 0 and at % 8:  # the end of one lookup, and the start of the next
            at = row.find(key, at + 1)
        return 0 if at < 0 else self._holders.bits[self._numbers[first + at // 8]]

    def _divide(self, news: Iterable[_News]) -> None:
        """Split reports by void and other replicas, each replica's reports in their order."""
        parts: tuple[list[_News], list[_News]] = [], []
        for one in news:
            parts[self._dropped >> one.replica & 1].append(one)
        self._news, self._later = parts
        self._count, self._count_later = (sum(len(one.digests) for one in some) for some in parts)

    def _settle(self) -> None:
        """Take the reports into the table in their order; those of void replicas stay."""
        ready = self._news
        if not ready:
            return
        self._news, self._count = [], 0
        places = self._places(np.concatenate([one.digests for one in ready]))
        there = places >= 0
        ends = there.cumsum()[np.cumsum([len(one.digests) for one in ready]) - 1]
        places, start = places[there], 0
        for one, end in zip(ready, ends.tolist(), strict=True):
            bit = 1 << one.replica
            added, removed = (bit, 0) if one.held else (0, bit)
            self._heard |= added
            self._change(places[start:end], added, removed)
            start = end
        self._free(places)

    def _places(self, digests: np.ndarray) -> np.ndarray:
        """Return the slot of each digest, a free slot if new; -1 where its bucket is full."""
        digests = np.maximum(digests, 1)  # 0 is the key of free slots
        buckets = (digests % np.uint64(self._buckets)).view(np.int64)
        places = np.full(len(digests), -1)
        left = np.arange(len(digests))
        while len(left):
            keys, rows = digests[left], self._rows.take(buckets[left], 0)
            slots = (rows == 0).argmax(1)
            cells = (rows == keys[:, None]).ravel().nonzero()[0]
            slots[cells // _WIDTH] = cells % _WIDTH
            slots += buckets[left] * _WIDTH
            fits = (self._keys[slots] == 0) | (self._keys[slots] == keys)
            left, keys, slots = left[fits], keys[fits], slots[fits]
            self._keys[slots[::-1]] = keys[::-1]  # of several the first takes the slot
            won = self._keys[slots] == keys
            places[left[won]] = slots[won]
            left = left[~won]
        return places

    def _change(self, places: np.ndarray, added: int = 0, removed: int = 0) -> None:
        """Add holders (bits) at `places`, and remove the holders `removed` and the void ones."""
        removed |= self._dropped
        before = self._sets[places]
        distinct = sorted(set(before.tolist()), reverse=True)  # what is new comes last
        for old in distinct:
            bits = self._holders.bits[old]
            wanted = (bits | added) & ~removed
            number = self._holders.number_of(wanted)
            if number is None:
                # Too many sets: no replica may be reported for a prefix that it lacks.
                number = old if wanted & bits == bits else 0
            if number == old:
                continue
            those = places[before == old] if len(distinct) > 1 else places
            if not old:
                those = those[: self._limit - self._known]
            self._sets[those] = number
            self._known += len(those) * (bool(number) - bool(old))
            self._holders.count(number, len(those))
            self._holders.count(old, -len(those))

    def _free(self, places: np.ndarray) -> None:
        """Free the slots of `places` that no replica holds."""
        self._keys[places[self._sets[places] == 0]] = 0
