"""The policy of a tier against lists: what is where, what goes, and what is not written twice."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.tier import HOUR, Entry, HourlyBytes, Label, Tier

KEYS = st.integers(0, 9)


def label(number: int) -> Label:
    return Label(bytes([number]), b"owner")


class TierMachine(RuleBasedStateMachine):
    """`order`: the numbers that are here, the one to drop next first."""

    @initialize(slots=st.integers(1, 4))
    def start(self, slots: int) -> None:
        self.slots = slots
        self.tier = Tier(slots)
        self.order: list[int] = []
        self.wanted: set[int] = set()
        self.unwanted: list[int] = []
        self.writing: list[Entry] = []
        self.unproven: list[Entry] = []
        self.reading: list[Entry] = []
        self.all: list[Entry] = []

    def whole(self, number: int) -> bool:
        here = number in self.order
        busy = any(entry.label.key[0] == number for entry in self.writing + self.unproven)
        return here and not busy

    def droppable(self) -> list[int]:
        read = {entry.label.key[0] for entry in self.reading}
        return [number for number in self.order if self.whole(number) and number not in read]

    def taken(self) -> int:
        """A slot is taken while its block is here, or is being written or read."""
        busy = self.writing + self.reading
        return sum(entry in busy or not self.stale(entry) for entry in self.all)

    def stale(self, entry: Entry) -> bool:
        return self.tier.get(entry.label.key) is not entry

    @rule(number=KEYS)
    def add(self, number: int) -> None:
        if number in self.order:
            return
        full = self.taken() >= self.slots
        assert self.tier.takes(bytes([number])) == (
            number not in self.unwanted and (not full or bool(self.droppable()))
        )
        if not self.tier.takes(bytes([number])):
            return
        if full:
            gone = self.droppable()[0]
            dropped = self.tier.next_dropped()
            assert dropped is not None and dropped.label.key[0] == gone
            self.order.remove(gone)
            if gone not in self.wanted:
                self.unwanted = [*self.unwanted, gone][-4 * self.slots :]
            self.wanted.discard(gone)
        entry = self.tier.add(label(number))
        assert entry is not None
        self.order.append(number)
        self.wanted.discard(number)
        self.all.append(entry)
        self.writing.append(entry)
        self.unproven.append(entry)

    @rule(numbers=st.lists(KEYS, unique=True, max_size=4))
    def want(self, numbers: list[int]) -> None:
        self.tier.want([bytes([number]) for number in numbers])
        self.unwanted = [one for one in self.unwanted if one not in numbers]
        for number in reversed(numbers):
            if number in self.order:
                self.order.remove(number)
                self.order.append(number)
                self.wanted.add(number)

    @rule(number=KEYS)
    def keep_longer(self, number: int) -> None:
        assert self.tier.keep_longer(bytes([number])) == (number in self.order)
        if number in self.order:
            self.order.remove(number)
            self.order.append(number)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def written(self, data, ok: bool) -> None:
        entry = data.draw(st.sampled_from(self.writing))
        self.writing.remove(entry)
        stale = self.stale(entry)
        found = self.tier.written(entry.slot, ok)
        if not ok and not stale:
            self.order.remove(entry.label.key[0])
        if not ok or stale:
            self.unproven = [one for one in self.unproven if one is not entry]
        assert (found is entry) == (ok and not stale and entry not in self.unproven)

    @precondition(lambda self: self.unproven)
    @rule()
    def prove(self) -> None:
        entry = self.unproven.pop(0)
        readable = self.tier.prove(entry)
        assert readable == (not self.stale(entry) and entry not in self.writing)

    @rule(number=KEYS)
    def discard(self, number: int) -> None:
        entry = self.tier.get(bytes([number]))
        if entry is not None:
            self.tier.discard(entry)
            self.order.remove(number)
            self.wanted.discard(number)
            if entry.written:
                self.unproven = [one for one in self.unproven if one is not entry]

    @rule(number=KEYS)
    def read(self, number: int) -> None:
        entry = self.tier.find(bytes([number]))
        assert (entry is not None) == self.whole(number)
        if entry is not None:
            self.tier.begin_read(entry)
            self.reading.append(entry)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def end_read(self, data, ok: bool) -> None:
        entry = data.draw(st.sampled_from(self.reading))
        self.reading.remove(entry)
        stale = self.stale(entry)
        self.tier.end_read(entry.slot, ok)
        if not ok and not stale:
            self.order.remove(entry.label.key[0])
            self.wanted.discard(entry.label.key[0])

    @invariant()
    def it_is_as_the_lists_say(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert [entry.label.key[0] for entry in self.tier.entries()] == self.order
        assert len(self.tier) <= self.slots
        readable = {entry.label.key[0] for entry in self.tier.entries() if entry.whole}
        assert readable == {number for number in self.order if self.whole(number)}


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_what_is_found_at_the_start_goes_in_its_order() -> None:
    tier = Tier(5)
    assert tier.restore([(3, label(1), True), (1, label(2), False), (0, label(1), True)]) == [0]
    tier.check()
    slots = {tier.add(label(number)).slot for number in (3, 4, 5)}  # type: ignore[union-attr]
    assert slots == {0, 2, 4}
    dropped = tier.next_dropped()
    assert dropped is not None and dropped.label == label(1)


def test_no_more_than_so_many_bytes_an_hour() -> None:
    now = 0.0
    bound = HourlyBytes(100, lambda: now)
    written: list[tuple[float, int]] = []
    order = np.random.default_rng(1)
    for _ in range(2000):
        now += float(order.exponential(40.0))
        size = int(order.integers(1, 30))
        if bound.take(size):
            written.append((now, size))
        assert sum(size for at, size in written if at > now - HOUR) <= 100
    assert sum(size for _, size in written) > 0.8 * 100 * now / (HOUR + 60)


def test_keys_are_those_of_prefixes() -> None:
    tokens = np.arange(23, dtype=np.int32)
    keys = prefix_keys(b"one", tokens, 4)
    assert len(keys) == 5 == len(set(keys)) and {len(key) for key in keys} == {16}
    assert prefix_keys(b"one", tokens, 4, first=2) == keys[2:]
    assert prefix_keys(b"one", tokens[:12], 4) == keys[:3]
    other = tokens.copy()
    other[5] = 7
    assert prefix_keys(b"one", other, 4)[0] == keys[0]
    assert not set(prefix_keys(b"one", other, 4)[1:]) & set(keys)
    assert not set(prefix_keys(b"two", tokens, 4)) & set(keys)
