"""What is below the pool, and the moves of blocks between the two."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.cache import Node, RadixTree
from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.tier import Entry, HourlyBytes, Label, Tier
from rootlace.runtime.contracts.block_store import NO_MOVES, PASS, SAVE, HandedState, StoreState
from rootlace.runtime.contracts.messages import adapter_and_namespace, kv_space


@dataclass(frozen=True)
class Level:
    """A tier and where its blocks are. `wear` bounds what is written to it."""

    name: str
    tier: Tier
    store: StoreState
    wear: HourlyBytes
    block_bytes: int

    @property
    def block_seconds(self) -> float:
        """What a block more takes, of some that are read."""
        return self.store.seconds(1) - self.store.seconds(0)

    def publish(self, entry: Entry) -> None:
        """The entry can be read from now on."""
        self.store.publish(entry.slot, entry.label.key, entry.label.owner)

    def release(self, slot: int) -> None:
        """A slot that was fetched is not loaded."""
        self.store.release(slot)
        self.tier.end_read(slot, True)

    def discard(self, entries: list[Entry]) -> None:
        """Forget entries, for the next start as well."""
        for entry in entries:
            self.tier.discard(entry)
        self.store.erase([entry.slot for entry in entries if entry.whole])


@dataclass(frozen=True)
class HandedLevel(Level):
    """What engines hand each other. Nothing that the pool gives up goes there."""

    store: HandedState


def as_measured(tokens: int) -> float:
    """Stands for what the scheduler finds its own steps to take."""
    raise NotImplementedError


@dataclass(frozen=True)
class Tiers:
    """What is below the pool, the fastest first. `space_of`: at most 64 bytes that are others for
    every namespace of the tree and every content of an adapter (the model is the store's).
    `prefill_seconds`: how long so many tokens take to be computed. `handed`: what other engines
    hand over."""

    levels: tuple[Level, ...] = ()
    space_of: Callable[[Hashable], bytes] = kv_space
    prefill_seconds: Callable[[int], float] = as_measured
    handed: HandedLevel | None = None

    @property
    def readable(self) -> tuple[Level, ...]:
        """All that blocks are read from."""
        return self.levels if self.handed is None else (*self.levels, self.handed)

    @property
    def working(self) -> bool:
        return any(level.store.working for level in self.levels)

    def pays(self, level: Level, block_size: int) -> bool:
        """Whether a block more, of some that are read, is read faster than computed."""
        return level.block_seconds < self.prefill_seconds(block_size)

    def find(self, key: bytes) -> tuple[int, Entry] | None:
        """The first level that has a block, and its entry there."""
        for at, level in enumerate(self.readable):
            entry = level.tier.find(key)
            if entry is not None and level.store.working:
                return at, entry
        return None


def owner_of(kv: Hashable) -> bytes:
    """What stands for a namespace, with any adapter, in labels."""
    return _digest(adapter_and_namespace(kv)[1])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Moves:
    """Moves that were planned and not made, in the order in which blocks changed hands."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Level and slot of those that load."""
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Those of loads that were handed out."""

    def take(self) -> np.ndarray:
        """int32 [M, 4]: what is to be moved before the next step; see `contracts.block_store`."""
        if not self.rows:
            return NO_MOVES
        rows, self.rows = self.rows, []
        self.taken += self.loads
        self.loads = []
        return np.array(rows, np.int32)


# Saving -------------------------------------------------------------------------------------------
#
# Which blocks are saved when the pool gives them up.


class Saving:
    """Plans the moves that save blocks. Only whole ones are kept.

    A block is published only when it was written and all steps that were under way when it was
    saved have ended well: one that failed may have left anything in it.
    """

    def __init__(self, tree: RadixTree, tiers: Tiers, moves: Moves) -> None:
        self._tree = tree
        self._size = tree.block_size
        self._tiers = tiers
        self._levels = tiers.levels
        self._moves = moves
        self._unproven: deque[tuple[int, int, Entry]] = deque()
        """How many steps were launched when it was saved, level and entry."""
        self.mortal: Counter[bytes] = Counter()
        """Keys of blocks with a time to live, and how many requests gave them one. They are not
        saved: nobody would ever forget what a process that is killed left of them on a disk."""
        self._launched = self._committed = 0

    def losing(self, leaf: Node, end: int) -> None:
        """`leaf` is about to lose its tokens from position `end` on, to make room."""
        for label, block in self._whole_blocks(leaf, max(end, leaf.start)):
            if not any(level.tier.keep_longer(label.key) for level in self._levels):
                self._save(0, label, (SAVE, block))

    def _whole_blocks(self, node: Node, start: int) -> list[tuple[Label, int]]:
        """Of the node's blocks from position `start` on those that may be saved, with what they
        are, the last first: a block is to be dropped before the one it follows."""
        size = self._size
        first = start // size if start == node.start else -(-start // size)
        if not self._tiers.working or first >= node.end // size:
            return []
        parts, link = [node.tokens], node.parent
        assert link is not None
        while not link.is_root:
            parts.append(link.tokens)
            assert link.parent is not None
            link = link.parent
        owner = owner_of(link.namespace)
        keys = prefix_keys(
            self._tiers.space_of(link.namespace), np.concatenate(parts[::-1]), size, first
        )
        return [
            (Label(key, owner), int(node.blocks[number - node.start // size]))
            for number, key in reversed(list(enumerate(keys, first)))
            if key not in self.mortal
        ]

    def _save(self, at: int, label: Label, source: tuple[int, int]) -> bool:
        """Plan the move of a block into the level `at`, if that is allowed and worth it. `source`:
        SAVE and a block of the pool, or PASS and a slot of the level before."""
        level = self._levels[at]
        store, tier = level.store, level.tier
        if store.room <= 0 or not tier.takes(label.key):
            return False
        if not self._tiers.pays(level, self._size) or not level.wear.take(level.block_bytes):
            return False
        dropped = tier.next_dropped()
        if dropped is not None and at + 1 < len(self._levels):
            self._pass_on(at, dropped)
        if dropped is not None:  # also where the move is not made in the end
            store.erase([dropped.slot])
        entry = tier.add(label)
        assert entry is not None
        store.reserve(entry.slot, label.key)
        kind, place = source
        if kind == PASS:
            self._moves.rows.append((PASS, at - 1, place, entry.slot))
        else:
            self._moves.rows.append((SAVE, at, entry.slot, place))
        self._unproven.append((self._launched, at, entry))
        return True

    def _pass_on(self, at: int, entry: Entry) -> None:
        """What a level drops goes to the next one, unless that has it."""
        if not self._levels[at + 1].tier.keep_longer(entry.label.key):
            self._save(at + 1, entry.label, (PASS, entry.slot))

    # ------------------------------------------------------------ steps

    def launched(self) -> None:
        """A step was planned, and will be launched after the moves so far."""
        self._launched += 1

    def committed(self) -> None:
        """The oldest step under way has ended well."""
        self._committed += 1
        self.prove()

    def prove(self) -> None:
        """Publish what is written and no longer depends on a step under way."""
        while self._unproven and self._unproven[0][0] <= self._committed:
            _, at, entry = self._unproven.popleft()
            if self._levels[at].tier.prove(entry):
                self._levels[at].publish(entry)

    def written(self, at: int, slot: int, ok: bool) -> None:
        """A store has written a slot."""
        entry = self._levels[at].tier.written(slot, ok)
        if entry is not None:
            self._levels[at].publish(entry)

    def reset(self) -> None:
        """A step failed: what was saved since the last good one may be anything."""
        for kind, at, slot, other in self._moves.rows:
            if kind == SAVE:
                self._levels[at].store.cancel(slot)
                self._levels[at].tier.written(slot, False)
            elif kind == PASS:
                self._levels[at + 1].store.cancel(other)
                self._levels[at + 1].tier.written(other, False)
        for _, at, entry in self._unproven:
            self._levels[at].tier.discard(entry)
        self._unproven.clear()
        self._committed = self._launched

    @property
    def now(self) -> int:
        """How many steps were launched."""
        return self._launched

    def has_ended(self, launched: int) -> bool:
        """Whether so many have ended well."""
        return launched <= self._committed

    # ------------------------------------------------------------ before a stop

    def spill(self) -> Iterator[None]:
        """Plan moves that save what the tree holds, what was used last first, and then what is in
        other levels, to the last one. No step is under way. Stops where there is no room: the
        caller has the moves made and waits until they are written before it goes on."""
        last = len(self._levels) - 1
        if last < 0:
            return
        level = self._levels[last]
        order: list[bytes] = []
        nodes = sorted(_nodes(self._tree), key=lambda one: one.last_use, reverse=True)
        for node in nodes:
            for label, block in reversed(self._whole_blocks(node, node.start)):
                if level.store.room <= 0:
                    yield
                if len(order) >= level.tier.num_slots:
                    break
                if label.key in level.tier or self._save(last, label, (SAVE, block)):
                    order.append(label.key)
        for upper in self._levels[:last][-1:]:
            for entry in reversed(list(upper.tier.entries())):
                if level.store.room <= 0:
                    yield
                if entry.whole and entry.label.key not in level.tier:
                    self._save(last, entry.label, (PASS, entry.slot))
        yield
        for key in reversed(order):
            level.tier.keep_longer(key)


def _nodes(tree: RadixTree) -> list[Node]:
    """All of them but roots, each behind its parent."""
    nodes = list(tree.roots.values())
    for node in nodes:  # it grows meanwhile
        nodes.extend(node.children.values())
    return [node for node in nodes if not node.is_root]
