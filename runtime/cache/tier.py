"""Which blocks lie in a tier below the pool (main memory, a disk), and which of them goes next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rootlace.runtime.cache.journal import Ledger
from rootlace.runtime.cache.wear import Unwanted

_REMEMBERED = 4
"""So many keys are remembered of dropped blocks, for each slot."""
_MOST_REMEMBERED = 1 << 18


@dataclass(frozen=True, slots=True)
class Label:
    """What a block is: `key` names its prefix (`prefix_keys`), `owner` whose it is, `digest` is
    that of `PrefixDigests`."""

    key: bytes
    owner: bytes
    digest: int


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

    def __init__(self, num_slots: int, ledger: Ledger | None = None) -> None:
        self.num_slots = num_slots
        self.ledger = ledger
        """Hears which digests can be read here, where somebody wants to know."""
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        """The one to drop next first."""
        self._slots: dict[int, Entry] = {}
        self._free: list[int] = []
        """Slots that were given back, below `_unused`; those from there on were never in use."""
        self._unused = 0
        self._unwanted = Unwanted(min(_REMEMBERED * num_slots, _MOST_REMEMBERED))
        self.dropped = 0

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
        self._unwanted.wanted(keys)
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
        return key not in self._unwanted and bool(self._has_free() or self.next_dropped())

    def next_dropped(self) -> Entry | None:
        """What `add` drops for the next block; None if nothing has to be, or nothing can."""
        if self._has_free():
            return None
        return next((one for one in self.entries() if one.whole and not one.readers), None)

    def add(self, label: Label) -> Entry | None:
        """A slot for a block that is not here; None if all are being written or read. The block is
        here once `written` and `prove` were called."""
        if not self._has_free():
            entry = self.next_dropped()
            if entry is None:
                return None
            if not entry.wanted:
                self._unwanted.add(entry.label.key)
            self.dropped += 1
            self.discard(entry)
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._unused
            self._unused += 1
        entry = Entry(label, slot)
        self._entries[label.key] = self._slots[entry.slot] = entry
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
            self._entries[label.key] = self._slots[slot] = entry
            self._tell(entry, True)
        self._unused = max(self._slots, default=-1) + 1
        self._free = [slot for slot in range(self._unused) if slot not in self._slots]
        return double

    def written(self, slot: int, ok: bool) -> Entry | None:
        """The slot was written; the entry if it can be read from now on. It is gone if that went
        wrong, or if it was discarded meanwhile."""
        entry = self._slots[slot]
        if not ok:
            self._forget(entry)
        entry.written = True
        if self.get(entry.label.key) is not entry:
            self._give_back(entry)
            return None
        return self._if_whole(entry)

    def prove(self, entry: Entry) -> bool:
        """The steps that computed the block have ended well; whether it can be read from now on."""
        entry.proven = True
        return self.get(entry.label.key) is entry and self._if_whole(entry) is not None

    def discard(self, entry: Entry) -> None:
        """Forget a block. Its slot is free once it is neither written nor read."""
        self._forget(entry)
        if entry.written and not entry.readers and self._slots.get(entry.slot) is entry:
            self._give_back(entry)

    def begin_read(self, entry: Entry) -> None:
        entry.readers += 1

    def end_read(self, slot: int, ok: bool) -> None:
        """A slot was read; damaged ones are forgotten."""
        entry = self._slots[slot]
        entry.readers -= 1
        if not ok or self.get(entry.label.key) is not entry:
            self.discard(entry)

    def forget_unwanted(self) -> None:
        """Remember nothing of what was dropped."""
        self._unwanted.clear()

    def _has_free(self) -> bool:
        return bool(self._free) or self._unused < self.num_slots

    def _if_whole(self, entry: Entry) -> Entry | None:
        if not entry.whole:
            return None
        self._tell(entry, True)
        return entry

    def _forget(self, entry: Entry) -> None:
        key = entry.label.key
        if self._entries.get(key) is entry:
            del self._entries[key]
            if entry.whole:
                self._tell(entry, False)

    def _give_back(self, entry: Entry) -> None:
        del self._slots[entry.slot]
        self._free.append(entry.slot)

    def _tell(self, entry: Entry, held: bool) -> None:
        if self.ledger is not None:
            self.ledger.note(entry.label.digest, held)

    def digests(self) -> list[int]:
        """Of all that can be read: for who missed a change."""
        return [entry.label.digest for entry in self.entries() if entry.whole]

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert not self._slots.keys() & set(self._free), "a slot in use is free"
        assert len(self._free) + len(self._slots) == self._unused, "a slot is lost"
        assert self._unused <= self.num_slots, "there are not so many slots"
        for key, entry in self._entries.items():
            assert entry.label.key == key and self._slots[entry.slot] is entry
            assert entry.whole or not entry.readers, "a block is read that is not there"
        for slot, entry in self._slots.items():
            assert entry.slot == slot
            named = self._entries.get(entry.label.key) is entry
            assert named or not entry.written or entry.readers, "a slot is kept for nobody"
