"""The index of an offload tier (host memory, a disk): blocks by slot, and the order of eviction."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

# Wear of a disk -----------------------------------------------------------------------------------


HOUR = 3600.0
_SPAN = 60.0
"""Seconds of a span whose written bytes are counted together."""


class HourlyBytes:
    """At most `most` bytes in any hour."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._spans: deque[tuple[float, int]] = deque()
        """(end of the span, bytes written)."""
        self._bytes = 0

    def take(self, count: int) -> bool:
        """Count `count` bytes to be written now; False if over the limit."""
        now = self._clock()
        while self._spans and self._spans[0][0] + HOUR <= now:
            self._bytes -= self._spans.popleft()[1]
        if self._bytes + count > self._limit:
            return False
        self._bytes += count
        if self._spans and now < self._spans[-1][0]:
            end, before = self._spans.pop()
            self._spans.append((end, before + count))
        else:
            self._spans.append((now + _SPAN, count))
        return True


# Tier ---------------------------------------------------------------------------------------------


_REMEMBERED = 4
"""Keys of dropped blocks remembered, per slot."""
_MOST_REMEMBERED = 1 << 18


class Label(msgspec.Struct, frozen=True):
    """Identity of a block: `key` names its prefix (`prefix_keys`), `owner` its namespace."""

    key: bytes
    owner: bytes


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a slot.

    Readable once `written` and `proven` (the steps that computed the block ended well). `readers`:
    reads in progress.
    """

    label: Label
    slot: int
    written: bool = False
    proven: bool = False
    wanted: bool = False
    """Whether the block was read, or asked for, since the write."""
    readers: int = 0

    @property
    def whole(self) -> bool:
        return self.written and self.proven


class Tier:
    """Slots of one block each, indexed by the key of the block.

    The block asked for longest ago is dropped first; a block being written or read stays. A block
    dropped without ever being asked for is not saved again, unless a prompt asks for it meanwhile.
    Every operation costs O(1) per key, and O(blocks being written or read).
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        """Entries in order of eviction, the first to drop first."""
        self._in_use: dict[int, Entry] = {}
        """Entries by slot; a slot is in use, too, while a forgotten block is written or read."""
        self._given_back: list[int] = []
        """Free slots below `_unused`, used first; slots from `_unused` on were never in use."""
        self._unused = 0
        self.unwanted: OrderedDict[bytes, None] = OrderedDict()
        """Last keys of blocks dropped before any request asked for the blocks."""
        self.dropped = 0
        self.journal: dict[bytes, bool] | None = None
        """Key -> whether readable now, for keys changed since the last take; None: not kept."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in order of eviction."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """Return the block of `key`, perhaps not readable yet."""
        return self._entries.get(key)

    def find(self, key: bytes) -> Entry | None:
        """Return the block of `key`, if readable."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.whole else None

    def want(self, keys: list[bytes]) -> None:
        """Note that a prompt begins with the blocks of `keys`, in their order."""
        if self.unwanted:
            for key in keys:
                self.unwanted.pop(key, None)
        for key in reversed(keys):  # the begin of a prompt is dropped after its continuation
            entry = self._entries.get(key)
            if entry is not None:
                entry.wanted = True
                self._entries.move_to_end(key)

    def keep_longer(self, key: bytes) -> bool:
        """Return whether the tier has the block that the pool evicts; moves the block to the end of
        eviction."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def takes(self, key: bytes) -> bool:
        """Return whether a missing block of `key` is worth the write, and the tier has room."""
        return key not in self.unwanted and bool(self._has_free or self.next_dropped())

    def next_dropped(self) -> Entry | None:
        """Return the block that the next `add` drops; None if none must be dropped, or none can."""
        if self._has_free:
            return None
        return next((entry for entry in self.entries() if entry.whole and not entry.readers), None)

    def add(self, label: Label) -> Entry | None:
        """Return a slot for a missing block; None if all slots are being written or read. The block
        is readable after `written` and `prove`."""
        if not self._has_free:
            entry = self.next_dropped()
            if entry is None:
                return None
            if not entry.wanted:
                self.unwanted[entry.label.key] = None
                if len(self.unwanted) > min(_REMEMBERED * self.num_slots, _MOST_REMEMBERED):
                    self.unwanted.popitem(last=False)
            self.dropped += 1
            self.discard(entry)
        if not self._given_back:
            self._given_back.append(self._unused)
            self._unused += 1
        entry = Entry(label, self._given_back.pop())
        self._entries[label.key] = self._in_use[entry.slot] = entry
        return entry

    def restore(self, saved: Iterable[tuple[int, Label, bool]]) -> list[int]:
        """Restore the slots of an earlier start: (slot, label, wanted), in order of eviction.

        Returns the slots of keys that are in another slot already.
        """
        double = []
        for slot, label, wanted in saved:
            if label.key in self._entries:
                double.append(slot)
                continue
            entry = Entry(label, slot, written=True, proven=True, wanted=wanted)
            self._entries[label.key] = entry
        self._in_use = {entry.slot: entry for entry in self.entries()}
        self._unused = max(self._in_use, default=-1) + 1
        self._given_back = [slot for slot in range(self._unused) if slot not in self._in_use]
        return double

    def written(self, slot: int, ok: bool) -> Entry | None:
        """Note the end of a write; return the entry if readable from now on.

        After a failed write, or a discard meanwhile, the entry is gone.
        """
        entry = self._in_use[slot]
        if not ok:
            self._forget(entry)
        entry.written = True
        if self.get(entry.label.key) is not entry:
            self._give_back(slot)
            return None
        return entry if self._readable(entry) else None

    def prove(self, entry: Entry) -> bool:
        """Note that the block's steps ended well; return whether the block is readable now."""
        entry.proven = True
        return self.get(entry.label.key) is entry and self._readable(entry)

    def discard(self, entry: Entry) -> None:
        """Forget a block; its slot is free once no write or read uses the slot."""
        self._forget(entry)
        if entry.written and not entry.readers and self._in_use.get(entry.slot) is entry:
            self._give_back(entry.slot)

    def begin_read(self, entry: Entry) -> None:
        entry.readers += 1

    def end_read(self, slot: int, ok: bool) -> None:
        """Note the end of a read; a damaged block is forgotten."""
        entry = self._in_use[slot]
        entry.readers -= 1
        if not ok or self.get(entry.label.key) is not entry:
            self.discard(entry)

    @property
    def _has_free(self) -> bool:
        return bool(self._given_back) or self._unused < self.num_slots

    def _give_back(self, slot: int) -> None:
        del self._in_use[slot]
        self._given_back.append(slot)

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.label.key) is entry:
            del self._entries[entry.label.key]
            if self.journal is not None:
                self.journal[entry.label.key] = False

    def _readable(self, entry: Entry) -> bool:
        """Return whether the entry has just become readable."""
        if entry.whole and self.journal is not None:
            self.journal[entry.label.key] = True
        return entry.whole

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        free = set(self._given_back)
        assert len(self._given_back) == len(free), "a slot is free twice"
        assert not self._in_use.keys() & free, "a slot in use is free"
        assert len(free) + len(self._in_use) == self._unused, "a slot is lost"
        assert self._unused <= self.num_slots, "there are not so many slots"
        for key, entry in self._entries.items():
            assert entry.label.key == key and self._in_use[entry.slot] is entry
            assert entry.whole or not entry.readers, "a block is read that is not there"
        for slot, entry in self._in_use.items():
            assert entry.slot == slot
            named = self._entries.get(entry.label.key) is entry
            assert named or not entry.written or entry.readers, "a slot is kept for nobody"
