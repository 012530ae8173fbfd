"""The prefixes in the caches of all replicas: digest -> set of replicas.

digest of "You are a poet"  -> {0, 2}      a holder of a prefix holds all shorter prefixes
digest of "You are a"       -> {0, 1, 2}
"""

from __future__ import annotations

import sys
from collections.abc import Callable

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

    def __init__(self, most: int = MOST_SETS) -> None:
        self.bits = [0]
        """Set by number."""
        self._most = most
        self._numbers = {0: 0}
        self._uses = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, bits: int) -> int | None:
        """The number of a set, to be counted at once; None if there are too many sets."""
        number = self._numbers.get(bits)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.bits[number] = bits
            elif len(self.bits) < self._most:
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
        found = np.zeros(self._most, bool)
        found[: len(self.bits)] = [bool(bits & replicas) for bits in self.bits]
        return found


# Index --------------------------------------------------------------------------------------------


MOST_ENTRIES = 10_000_000
_WIDTH = 16
"""Slots of a bucket; a full table fills half of them, so hardly any bucket overflows."""
_WORDS = _WIDTH + _WIDTH // 2
"""Words of 64 bits in a bucket: keys, then set numbers of 32 bits each."""
_FEWEST = 1 << 10
"""Buckets of a small table, in which no bucket overflows."""
_LOOKS = 64
"""Digests of a prompt looked up at most."""
_NONE = np.empty(0, np.uint64)
_SWEPT = 1 << 12
"""Buckets swept in less than a millisecond."""


class PrefixIndex:
    """Prefix digest (uint64) -> replicas that hold the prefix.

    A replica that holds a prefix holds all shorter ones, too. At most `most` prefixes are known;
    further ones are ignored until others go. The table has a bucket of slots for each few digests,
    allocated once: 24 bytes for each of `most` (the system commits used pages only), plus
    `HolderSets`. So the index never pauses to grow or to rehash.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        buckets = max(2 * most // _WIDTH, _FEWEST) | 1
        self._buckets = buckets
        self._words = np.zeros(buckets * _WORDS, np.uint64)
        self._halves = self._words.view(np.uint32)
        # A single lookup costs less through a memoryview.
        self._raw = self._words.data.cast("B")
        self._numbers = self._halves.data
        self._rows = self._words.reshape(buckets, _WORDS)
        self._sets = self._halves.reshape(buckets, 2 * _WORDS)[:, 2 * _WIDTH :]
        """Set numbers; 0 where a slot is free."""
        self._holders = HolderSets()
        self._most = most
        self._known = 0
        self._heard = 0
        """Replicas (bits) that may hold a prefix."""
        self._dropped = 0
        """Replicas (bits) whose entries are void and being removed."""
        self._left: dict[int, int] = {}
        """Replica -> buckets that may still have void entries."""
        self._next = 0
        """The next bucket to sweep; the first follows the last."""
        self._gone = np.empty(0, bool)
        """By number: sets that had any of the void replicas."""
        self._waiting: dict[int, list[Change]] = {}
        """Void replica -> changes reported since."""
        self._told = 0
        """Count of digests in these changes."""

    def __len__(self) -> int:
        return self._known

    def entries(self) -> dict[int, int]:
        """All entries: digest -> replicas (bits). O(size of the table)."""
        buckets, slots = self._sets.nonzero()
        sets = self._sets[buckets, slots].tolist()
        held = [self._holders.bits[number] & ~self._dropped for number in sets]
        return dict(zip(self._rows[buckets, slots].tolist(), held, strict=True))

    def apply(self, replica: int, change: Change) -> None:
        """Take in a replica's report on its cache."""
        if change.fresh:
            self.drop(replica)
        if self._dropped >> replica & 1:
            self._waiting.setdefault(replica, []).append(change)
            self._told += len(change.added) + len(change.removed)
            while self._told > self._most:  # the waiting digests take as much room as the table may
                self.sweep()
            return
        # One lookup for all digests.
        digests, gone = np.concatenate((change.removed, change.added)), len(change.removed)
        if not len(digests):
            return
        bit, here = 1 << replica, ~self._dropped
        buckets, rows, which, slots = self._find(digests)
        there = buckets.take(which)
        held = int(which.searchsorted(gone))
        if held:
            self._change(there[:held], slots[:held], lambda holders: holders & here & ~bit)
        if len(digests) == gone:
            return
        self._heard |= bit
        if len(which) > held:
            self._change(there[held:], slots[held:], lambda holders: (holders | bit) & here)
            new = np.ones(len(digests), bool)
            new[which] = False
            new[:gone] = False
            digests, buckets, rows = digests[new], buckets[new], rows[new]
        else:
            digests, buckets, rows = digests[gone:], buckets[gone:], rows[gone:]
        self._place(digests, buckets, rows, bit)

    def add(self, replica: int, digests: np.ndarray) -> None:
        """Add a replica to `digests`, each given once."""
        self.apply(replica, Change(digests, _NONE))

    def drop(self, replica: int) -> None:
        """Void all entries of a replica, from now on.

        In a large table the entries stay until `sweep` was called often enough.
        """
        bit = 1 << replica
        for change in self._waiting.pop(replica, ()):
            self._told -= len(change.added) + len(change.removed)
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
        others = ~self._dropped
        some = slice(self._next, min(self._next + _SWEPT, self._buckets))
        buckets, slots = self._gone[self._sets[some]].nonzero()
        if len(slots):
            self._change(buckets + some.start, slots, lambda holders: holders & others)
        self._next = some.stop % self._buckets
        for replica in list(self._left):
            self._left[replica] -= some.stop - some.start
            if self._left[replica] <= 0:
                del self._left[replica]
                self._dropped &= ~(1 << replica)
                for change in self._waiting.pop(replica, ()):
                    self._told -= len(change.added) + len(change.removed)
                    self.apply(replica, change)
        return bool(self._dropped)

    def match(self, digests: np.ndarray) -> list[tuple[int, int]]:
        """How many of a prompt's `digests` replicas hold: (count, replicas as bits), fewest first.

        `digests` (uint64) are of the prompt's prefixes, the shortest first. Replicas with none are
        left out. Costs O(log) lookups for each different count, of which there are few, the longest
        prefixes first. The total is bounded: beyond it some replicas are reported with fewer.
        """
        return self.longest(digests.item, len(digests))

    def longest(
        self, digest: Callable[[int], int], end: int, first: int = 0, among: int = -1
    ) -> list[tuple[int, int]]:
        """`match` among replicas `among` (bits), prefixes `first` to `end`, with `digest(at)`."""
        seen: dict[int, int] = {}
        """Block number -> holders looked up."""
        found: list[tuple[int, int]] = []
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
            found.append((low, others(low - 1)))
            left &= ~found[-1][1]
            end = low - 1
        for at in sorted(seen, reverse=True) if len(seen) >= _LOOKS else ():
            if rest := others(at):
                found.append((at + 1, rest))
                left &= ~rest
        return sorted(found)

    def _holders_of(self, digest: int) -> int:
        first = digest % self._buckets * _WORDS
        row = self._raw[8 * first : 8 * (first + _WIDTH)].tobytes()
        key = digest.to_bytes(8, sys.byteorder)
        at = row.find(key)
        while at > 0 and at % 8:  # the end of one lookup, and the start of the next
            at = row.find(key, at + 1)
        if at < 0:
            return 0
        return self._holders.bits[self._numbers[2 * (first + _WIDTH) + at // 8]]

    def _find(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The bucket of each digest and its content; the digests present, and their slots."""
        buckets = (digests % np.uint64(self._buckets)).view(np.int64)
        rows = self._rows.take(buckets, 0)
        found = (rows[:, :_WIDTH] == digests[:, None]).ravel().nonzero()[0]
        return buckets, rows, found >> 4, found & 15

    def _place(self, digests: np.ndarray, buckets: np.ndarray, rows: np.ndarray, bit: int) -> None:
        """Insert digests without a slot, for a single replica; `rows`: contents of the buckets."""
        number = self._holders.number_of(bit)
        if number is None:
            return
        while room := min(self._most - self._known, len(digests)):
            if room < len(digests):
                digests, buckets, rows = digests[:room], buckets[:room], rows[:room]
            free = rows.view(np.uint32)[:, 2 * _WIDTH :] == 0
            slots = free.argmax(1)
            fits = (slots > 0) | free[:, 0]
            if np.count_nonzero(fits) < room:  # some buckets are full
                digests, buckets, slots = digests[fits], buckets[fits], slots[fits]
                if not len(digests):
                    break
            places = buckets * _WORDS + slots
            self._words[places] = digests
            lost = self._words.take(places) != digests  # another digest of the bucket took the slot
            again = int(np.count_nonzero(lost))
            self._sets[buckets, slots] = number
            self._holders.count(number, len(digests) - again)
            self._known += len(digests) - again
            if not again:
                break
            digests, buckets = digests[lost], buckets[lost]
            rows = self._rows.take(buckets, 0)
        self._holders.count(number, 0)

    def _change(self, buckets: np.ndarray, slots: np.ndarray, to: Callable[[int], int]) -> None:
        """Replace the holders (bits) of slots by `to(holders)`."""
        before = self._sets[buckets, slots]
        distinct = set(before.tolist())
        for old in distinct:
            bits = self._holders.bits[old]
            number = self._holders.number_of(to(bits))
            if (
                number is None
            ):  # too many sets: no replica may be reported for a prefix that it lacks
                number = old if to(bits) & bits == bits else 0
            if number == old:
                continue
            there, those = buckets, slots
            if len(distinct) > 1:
                same = before == old
                there, those = buckets[same], slots[same]
            self._sets[there, those] = number
            if not number:
                self._rows[there, those] = 0
            self._known += len(there) * (bool(number) - bool(old))
            self._holders.count(number, len(there))
            self._holders.count(old, -len(there))
