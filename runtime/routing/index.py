"""What the caches of all replicas hold, as one table of digests of prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rootlace.runtime.cache.journal import Change

MOST_ENTRIES = 10_000_000
_LOOKS = 24
_AT_ONCE = 20_000
"""So many entries are looked at in a few milliseconds."""


class PrefixIndex:
    """Replicas by the digest of a prefix that they hold, as bits of an integer.

    A replica that holds a prefix holds all shorter ones, too. At most `most` prefixes are known: of
    what comes beyond, nothing is, until others go. About 90 bytes each, and more where many
    replicas hold the same.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._holders: dict[int, int] = {}
        self._most = most
        self._bits: list[int] = []
        """One integer for each replica, which all its entries share."""
        self._heard = 0
        """Replicas (bits) that may hold something."""
        self._dropped = 0
        """Replicas (bits) whose entries do not count and are being taken out."""
        self._to_sweep: list[int] = []
        """Digests that may be theirs."""
        self._waiting: list[tuple[int, Change]] = []
        """What these told since."""

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, replica: int, change: Change) -> None:
        """Take in what a replica says of its cache."""
        if change.fresh:
            self.drop(replica)
        if self._dropped & self._bit(replica):
            self._waiting.append((replica, change))
            return
        self.add(replica, change.added.tolist())
        self.remove(replica, change.removed.tolist())

    def add(self, replica: int, digests: Iterable[int]) -> None:
        holders, bit = self._holders, self._bit(replica)
        room = self._most - len(holders)
        self._heard |= bit
        for digest in digests:
            known = holders.get(digest)
            if known is not None:
                holders[digest] = known | bit if not known & bit else known
            elif room > 0:
                holders[digest] = bit
                room -= 1

    def remove(self, replica: int, digests: Iterable[int]) -> None:
        holders, bit = self._holders, self._bit(replica)
        for digest in digests:
            known = holders.get(digest)
            if known == bit:
                del holders[digest]
            elif known is not None and known & bit:
                holders[digest] = known & ~bit

    def drop(self, replica: int) -> None:
        """Forget all that a replica held: it does not count from now on. Where much is known, it
        lies there until `sweep` was called often enough."""
        bit = self._bit(replica)
        self._waiting = [(other, change) for other, change in self._waiting if other != replica]
        if not self._heard & bit:
            return
        self._heard &= ~bit
        self._dropped |= bit
        # Again from the beginning, where others are being taken out.
        self._to_sweep = list(self._holders)
        if len(self._to_sweep) <= _AT_ONCE:
            self.sweep()

    def sweep(self) -> bool:
        """Take out some of what dropped replicas held; whether there is more to do."""
        if not self._dropped:
            return False
        holders, gone = self._holders, self._dropped
        some = self._to_sweep[-_AT_ONCE:]
        del self._to_sweep[-_AT_ONCE:]
        for digest in some:
            known = holders.get(digest, 0)
            if known & gone:
                if rest := known & ~gone:
                    holders[digest] = rest
                else:
                    del holders[digest]
        if self._to_sweep:
            return True
        self._dropped = 0
        waiting, self._waiting = self._waiting, []
        for replica, change in waiting:
            self.apply(replica, change)
        return bool(self._dropped)

    def match(
        self, digests: Sequence[int], beside: PrefixIndex | None = None
    ) -> list[tuple[int, int]]:
        """How many of a prompt's `digests` (of its prefixes, the shortest first) replicas hold,
        here or in `beside`: pairs of a count and the replicas (bits) with that many, the fewest
        first; replicas with none are left out. Costs O(log) looks for each different count, of
        which there are few, and a bounded number in all: then some replicas are said to hold less
        than they do.
        """
        here, there = self._holders.get, (beside or self)._holders.get

        def get(digest: int) -> int:
            return here(digest, 0) | there(digest, 0)

        found: list[tuple[int, int]] = []
        depth, looks = 0, _LOOKS
        among = get(digests[0]) & ~self._dropped if digests else 0
        while among:
            # All of `among` hold depth + 1; find the last that they all hold.
            low, high = depth + 1, len(digests) + 1
            while high - low > 1:
                middle = (low + high) // 2
                if get(digests[middle - 1]) & among == among:
                    low = middle
                else:
                    high = middle
            looks -= 1
            depth = low
            beyond = get(digests[depth]) & among if depth < len(digests) and looks else 0
            found.append((depth, among & ~beyond))
            among = beyond
        return found

    def _bit(self, replica: int) -> int:
        while len(self._bits) <= replica:
            self._bits.append(1 << len(self._bits))
        return self._bits[replica]
