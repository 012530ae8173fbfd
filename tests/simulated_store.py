"""A store without a disk: blocks in a dictionary; writes and reads end when they are told to."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import numpy as np

from rootlace.runtime.cache.tier import Label, Tier
from rootlace.runtime.contracts.block_store import Done

AnyStore = TypeVar("AnyStore", bound="SimulatedStore")


class SimulatedStore:
    """See `StoreState`. A block is the arrays that the executor has of it.

    Without `slow` everything is done when it is asked for; with it, when `go_on` is called. What
    was published is there for the `next_start`.
    """

    def __init__(
        self, num_slots: int, writable_slots: int = 8, name: str = "disk", slow: bool = False
    ) -> None:
        self.name = name
        self.tier = Tier(num_slots)
        self.num_slots = num_slots
        self.working = True
        self.slow = slow
        self.writable_slots = writable_slots
        self.content: dict[int, list[np.ndarray]] = {}
        self.published: dict[int, Label] = {}
        self.read_slots: list[int] = []
        self.saved: list[bytes] = []
        """The keys of all blocks that were ever written."""
        self.damaged: set[int] = set()
        self._reserved: dict[int, bytes] = {}
        self._fetched: dict[int, list[np.ndarray]] = {}
        self._under_way: deque[Done] = deque()
        self._done: list[Done] = []

    def next_start(self) -> SimulatedStore:
        """What another process finds."""
        return self.found_by(SimulatedStore(self.num_slots, 8, self.name, self.slow))

    def found_by(self, found: AnyStore) -> AnyStore:
        """The store of another process, which finds what is here."""
        found.content = {slot: self.content[slot] for slot in self.published}
        found.published = dict(self.published)
        order = [one.slot for one in self.tier.entries() if one.slot in self.published]
        assert not found.tier.restore((slot, self.published[slot], True) for slot in order)
        return found

    def go_on(self, count: int = 1) -> None:
        """So many reads and writes end."""
        for _ in range(min(count, len(self._under_way))):
            done = self._under_way.popleft()
            ok = done.ok and self.working and not (done.read and done.slot in self.damaged)
            if done.read and not ok:
                self._fetched.pop(done.slot, None)
            if not done.read:
                self.writable_slots += 1
            self._done.append(done._replace(ok=ok))

    # ------------------------------------------------------------ the scheduler's side

    def reserve(self, slot: int, key: bytes) -> None:
        assert self.writable_slots > 0 and slot not in self._reserved
        self.writable_slots -= 1
        self._reserved[slot] = key

    def cancel(self, slot: int) -> None:
        del self._reserved[slot]
        self.writable_slots += 1

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        assert slot in self.content  # perhaps written just before the store was switched off
        self.published[slot] = Label(key, owner)

    def erase(self, slots: list[int]) -> None:
        for slot in slots:
            self.published.pop(slot, None)

    def fetch(self, slot: int, key: bytes) -> None:
        assert slot not in self._fetched, "a slot is fetched twice"
        assert self.published[slot].key == key
        self._fetched[slot] = [array.copy() for array in self.content[slot]]
        self.read_slots.append(slot)
        self._begin(Done(slot, read=True, ok=True))

    def release(self, slot: int) -> None:
        del self._fetched[slot]

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def seconds(self, blocks: int) -> float:
        return 1e-6 * blocks

    def refused(self) -> None:
        pass

    def stats(self) -> dict[str, int | float]:
        return {}

    # ------------------------------------------------------------ the executor's side

    def save(self, slot: int, block: list[np.ndarray]) -> None:
        self.saved.append(self._reserved.pop(slot))
        assert slot not in self.published, "what was dropped can still be found"
        self.content[slot] = [array.copy() for array in block]
        self._begin(Done(slot, read=False, ok=True))

    def load(self, slot: int, block: list[np.ndarray]) -> None:
        for target, source in zip(block, self._fetched.pop(slot), strict=True):
            target[:] = source

    def _begin(self, done: Done) -> None:
        self._under_way.append(done)
        if not self.slow:
            self.go_on()
