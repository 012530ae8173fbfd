"""Which blocks lie in a tier below the pool (main memory, a disk), and which of them goes next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

# Slots --------------------------------------------------------------------------------------------
#
# Slots of a tier: which are in use, and which one is next.


T = TypeVar("T")


class Slots(Generic[T]):
    """At most `most`, from 0 on. Those that were given back are used first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_use: dict[int, T] = {}
        self._given_back: list[int] = []
        """They are below `_unused`; those from there on were never in use."""
        self._unused = 0

    @property
    def free(self) -> bool:
        """Whether there is one."""
        return bool(self._given_back) or self._unused < self._most

    def take(self) -> int:
        """A free one, which the caller puts into `in_use`."""
        if self._given_back:
            return self._given_back.pop()
        self._unused += 1
        return self._unused - 1

    def give_back(self, slot: int) -> None:
        del self.in_use[slot]
        self._given_back.append(slot)

    def restore(self, found: dict[int, T]) -> None:
        """What is in use at first."""
        self.in_use = found
        self._unused = max(found, default=-1) + 1
        self._given_back = [slot for slot in range(self._unused) if slot not in found]

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        free = set(self._given_back)
        assert len(self._given_back) == len(free), "a slot is free twice"
        assert not self.in_use.keys() & free, "a slot in use is free"
        assert len(free) + len(self.in_use) == self._unused, "a slot is lost"
        assert self._unused <= self._most, "there are not so many slots"


# Wear ---------------------------------------------------------------------------------------------
#
# What may be written to a disk: so many bytes an hour, and nothing twice that nobody wanted.


HOUR = 3600.0
_SPAN = 60.0
"""Bytes are counted together for so many seconds."""


class HourlyBytes:
    """At most `most` bytes in any hour; None: as many as one likes."""

    def __init__(self, most: int | None, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._spans: deque[tuple[float, int]] = deque()
        """When each span ends, and its bytes."""
        self._bytes = 0

    def take(self, count: int) -> bool:
        """Count `count` bytes that are to be written now; False if they may not be."""
        if self._most is None:
            return True
        now = self._clock()
        while self._spans and self._spans[0][0] + HOUR <= now:
            self._bytes -= self._spans.popleft()[1]
        if self._bytes + count > self._most:
            return False
        self._bytes += count
        if self._spans and now < self._spans[-1][0]:
            end, before = self._spans.pop()
            self._spans.append((end, before + count))
        else:
            self._spans.append((now + _SPAN, count))
        return True


class Unwanted:
    """Keys of what was dropped before anybody wanted it back, the last `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def wanted(self, keys: Iterable[bytes]) -> None:
        """A prompt begins like these."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


# Tier ---------------------------------------------------------------------------------------------


_REMEMBERED = 4
"""So many keys are remembered of dropped blocks, for each slot."""
_MOST_REMEMBERED = 1 << 18


@dataclass(frozen=True, slots=True)
class Label:
    """What a block is: `key` names its prefix (`prefix_keys`), `owner` whose it is."""

    key: bytes
    owner: bytes


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a slot. It can be read once it is `written` and `proven` (the steps that computed
    it have ended well); `readers` read it now."""

    label: Label
    slot: int
    written: bool = False
    proven: bool = False
    wanted: bool = False
    """Whether it was read, or asked for, since it was written."""
    readers: int = 0

    @property
    def whole(self) -> bool:
        return self.written and self.proven


class Tier:
    """So many slots of a block each, by the keys of the blocks in them.

    What was wanted longest ago is dropped first; what is being written or read stays. A block that
    nobody wanted before it was dropped is not taken a second time, unless a prompt asks for it
    meanwhile. Every operation costs O(1) for each key, and O(blocks written or read now).
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        """The one to drop next first."""
        self._slots: Slots[Entry] = Slots(num_slots)
        self.unwanted = Unwanted(min(_REMEMBERED * num_slots, _MOST_REMEMBERED))
        self.dropped = 0
        self.journal: dict[bytes, bool] | None = None
        """Keys of blocks that can be read, or no longer can, since somebody emptied this; None:
        nobody does."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def entries(self) -> Iterator[Entry]:
        """All of them, the one to drop next first."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """The block of this key, though it may not be whole yet."""
        return self._entries.get(key)

    def find(self, key: bytes) -> Entry | None:
        """The block of this key, if it can be read."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.whole else None

    def want(self, keys: list[bytes]) -> None:
        """A prompt begins with the blocks of these `keys`, in their order."""
        self.unwanted.wanted(keys)
        for key in reversed(keys):  # what begins a prompt is dropped after what follows it
            entry = self._entries.get(key)
            if entry is not None:
                entry.wanted = True
                self._entries.move_to_end(key)

    def keep_longer(self, key: bytes) -> bool:
        """The pool gives this block up: whether it is here, and stays as if it came now."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def takes(self, key: bytes) -> bool:
        """Whether a block of this key, which is not here, is worth being written, and can be."""
        return key not in self.unwanted and bool(self._slots.free or self.next_dropped())

    def next_dropped(self) -> Entry | None:
        """What `add` drops for the next block; None if nothing has to be, or nothing can."""
        if self._slots.free:
            return None
        return next((one for one in self.entries() if one.whole and not one.readers), None)

    def add(self, label: Label) -> Entry | None:
        """A slot for a block that is not here; None if all are being written or read. The block is
        here once `written` and `prove` were called."""
        if not self._slots.free:
            entry = self.next_dropped()
            if entry is None:
                return None
            if not entry.wanted:
                self.unwanted.add(entry.label.key)
            self.dropped += 1
            self.discard(entry)
        entry = Entry(label, self._slots.take())
        self._entries[label.key] = self._slots.in_use[entry.slot] = entry
        return entry

    def restore(self, found: Iterable[tuple[int, Label, bool]]) -> list[int]:
        """What was there when the tier was opened: slot, label and whether it was wanted, the one
        to drop next first. Returns the slots of keys that are in another slot already."""
        double = []
        for slot, label, wanted in found:
            if label.key in self._entries:
                double.append(slot)
                continue
            entry = Entry(label, slot, written=True, proven=True, wanted=wanted)
            self._entries[label.key] = entry
        self._slots.restore({entry.slot: entry for entry in self.entries()})
        return double

    def written(self, slot: int, ok: bool) -> Entry | None:
        """The slot was written; the entry if it can be read from now on. It is gone if that went
        wrong, or if it was discarded meanwhile."""
        entry = self._slots.in_use[slot]
        if not ok:
            self._forget(entry)
        entry.written = True
        if self.get(entry.label.key) is not entry:
            self._slots.give_back(slot)
            return None
        return entry if self._readable(entry) else None

    def prove(self, entry: Entry) -> bool:
        """The steps that computed the block have ended well; whether it can be read from now on."""
        entry.proven = True
        return self.get(entry.label.key) is entry and self._readable(entry)

    def discard(self, entry: Entry) -> None:
        """Forget a block. Its slot is free once it is neither written nor read."""
        self._forget(entry)
        if entry.written and not entry.readers and self._slots.in_use.get(entry.slot) is entry:
            self._slots.give_back(entry.slot)

    def begin_read(self, entry: Entry) -> None:
        entry.readers += 1

    def end_read(self, slot: int, ok: bool) -> None:
        """A slot was read; damaged ones are forgotten."""
        entry = self._slots.in_use[slot]
        entry.readers -= 1
        if not ok or self.get(entry.label.key) is not entry:
            self.discard(entry)

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.label.key) is entry:
            del self._entries[entry.label.key]
            if self.journal is not None:
                self.journal[entry.label.key] = False

    def _readable(self, entry: Entry) -> bool:
        """Whether it can be read, which was not so before."""
        if entry.whole and self.journal is not None:
            self.journal[entry.label.key] = True
        return entry.whole

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        self._slots.check()
        for key, entry in self._entries.items():
            assert entry.label.key == key and self._slots.in_use[entry.slot] is entry
            assert entry.whole or not entry.readers, "a block is read that is not there"
        for slot, entry in self._slots.in_use.items():
            assert entry.slot == slot
            named = self._entries.get(entry.label.key) is entry
            assert named or not entry.written or entry.readers, "a slot is kept for nobody"
