"""The offload levels below the pool, and the block moves between pool and levels.

 evict: pool --SAVE--> level 0 --PASS--> level 1 ...     fetch: level --LOAD--> pool

A move is planned first, made before the next step, and published when the step ended well.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import RadixTree
from rootlace.runtime.cache.tier import Entry, HourlyBytes, Label, Tier
from rootlace.runtime.contracts.block_store import NO_MOVES, PASS, SAVE, HandedState, StoreState
from rootlace.runtime.contracts.messages import adapter_and_namespace, kv_space
from rootlace.runtime.scheduler.request import RequestState


class Level(msgspec.Struct, frozen=True):
    """Offload tier and the place of its blocks; `wear` bounds the writes of `block_bytes`."""

    name: str
    tier: Tier
    store: StoreState
    wear: HourlyBytes | None = None
    block_bytes: int = 0
    outlives: bool = False
    """Whether its blocks outlive the engine's process."""
    eager: bool = False
    """Whether copies are so cheap that blocks are saved as soon as they are computed."""

    @property
    def block_seconds(self) -> float:
        """Return the seconds added by one more block to a read of several."""
        return self.store.seconds(1) - self.store.seconds(0)

    def publish(self, entry: Entry) -> None:
        """Make the entry readable."""
        self.store.publish(entry.slot, entry.label.key, entry.label.owner)

    def release(self, slot: int) -> None:
        """Free a fetched slot without loading the block."""
        self.store.release(slot)
        self.tier.end_read(slot, True)

    def discard(self, entries: list[Entry]) -> None:
        """Forget entries, for the next start too."""
        for entry in entries:
            self.tier.discard(entry)
        self.store.erase([entry.slot for entry in entries if entry.whole])


class HandedLevel(Level, frozen=True):
    """Level of blocks that engines transfer to each other; evicted blocks never go there."""

    store: HandedState


def as_measured(tokens: int) -> float:
    """Stand in for the prefill time that the scheduler measures on its own steps."""
    raise NotImplementedError


class Tiers(msgspec.Struct, frozen=True):
    """Offload levels, the fastest first.

    `space_of`: at most 64 bytes, distinct for each namespace of the tree and each content of an
    adapter (the store knows the model). `prefill_seconds`: the time to compute a number of tokens.
    `handed`: the level of blocks transferred by other engines. `failed`: names of requested levels
    that could not be opened.
    """

    levels: tuple[Level, ...] = ()
    space_of: Callable[[Hashable], bytes] = kv_space
    prefill_seconds: Callable[[int], float] = as_measured
    handed: HandedLevel | None = None
    failed: tuple[str, ...] = ()

    @property
    def readable(self) -> tuple[Level, ...]:
        """Return all levels that blocks are read from."""
        return self.levels if self.handed is None else (*self.levels, self.handed)

    @property
    def working(self) -> bool:
        return any(level.store.working for level in self.levels)

    def pays(self, level: Level, block_size: int) -> bool:
        """Return whether one more block of a longer read is read faster than computed."""
        return level.block_seconds < self.prefill_seconds(block_size)

    def find(self, key: bytes) -> tuple[int, Entry] | None:
        """Return the first level with the block, and the entry there."""
        for at, level in enumerate(self.readable):
            entry = level.tier.find(key)
            if entry is not None and level.store.working:
                return at, entry
        return None


def owner_of(kv: Hashable) -> bytes:
    """Return the label of a namespace, with any adapter."""
    return _digest(adapter_and_namespace(kv)[1])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Moves:
    """Planned moves that were not made yet, in the order in which blocks changed owners."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Planned loads: (level, slot)."""
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Part of `loads` handed to the executor."""

    def take(self) -> np.ndarray:
        """Return the moves before the next step, int32 [M, 4]: see `contracts.block_store`."""
        if not self.rows:
            return NO_MOVES
        rows, self.rows = self.rows, []
        self.taken += self.loads
        self.loads = []
        return np.array(rows, np.int32)


# Saving -------------------------------------------------------------------------------------------


class Saving:
    """Planner of the moves that save evicted blocks; only full blocks are saved.

    A block is published once written, and once all steps in flight at its save ended well: a failed
    step may have left anything in the block.
    """

    def __init__(self, tree: RadixTree, tiers: Tiers, moves: Moves) -> None:
        self._tree = tree
        self._size = tree.block_size
        self._tiers = tiers
        self._levels = tiers.levels
        self._moves = moves
        self._unproven: deque[tuple[int, int, Entry]] = deque()
        """Unproven saves: (steps launched at the time of the save, level, entry)."""
        self.mortal: Counter[bytes] = Counter()
        """Count of requests that set a time to live, by key of the block. Such blocks are not
        saved: after a kill nothing would expire them on disk."""
        self._launched = self._committed = 0

    def losing(self, leaf: Node, end: int) -> None:
        """Save the blocks of `leaf` from position `end` on, before eviction drops them."""
        for label, block in self._whole_blocks(leaf, max(end, leaf.start)):
            if not any(level.tier.keep_longer(label.key) for level in self._levels):
                self._save(0, label, (SAVE, block))

    def ahead(self, at: int, sequence: RequestState, first: int, stop: int) -> None:
        """Save the blocks `first` to `stop` - 1 of a sequence in level `at`, before any eviction.

        The steps in flight have computed them.
        """
        if not self._tiers.working:
            return
        namespace, tokens = sequence.namespace, sequence.tokens[: stop * self._size]
        owner, tier = owner_of(namespace), self._levels[at].tier
        keys = prefix_keys(self._tiers.space_of(namespace), tokens, self._size, first)
        for key, block in zip(keys, sequence.table[first:stop].tolist(), strict=True):
            if key in self.mortal or key in tier:
                continue
            if not self._save(at, Label(key, owner), (SAVE, block)):
                return

    def _whole_blocks(self, node: Node, start: int) -> list[tuple[Label, int]]:
        """Return the node's savable full blocks from position `start` on, with labels, the last
        first. The last block is dropped first, before the block that it follows."""
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
        """Plan the move of a block into level `at`, if allowed and worth the write.

        `source`: SAVE and a block of the pool, or PASS and a slot of the level before.
        """
        level = self._levels[at]
        store, tier = level.store, level.tier
        if store.writable_slots <= 0 or not tier.takes(label.key):
            return False
        if not self._tiers.pays(level, self._size):
            return False
        if level.wear is not None and not level.wear.take(level.block_bytes):
            return False
        dropped = tier.next_dropped()
        if dropped is not None and at + 1 < len(self._levels):
            self._pass_on(at, dropped)
        if dropped is not None:  # even if the move is never made
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
        """Save a block dropped by a level in the next level, unless present there."""
        if not self._levels[at + 1].tier.keep_longer(entry.label.key):
            self._save(at + 1, entry.label, (PASS, entry.slot))

    # ------------------------------------------------------------ steps

    def launched(self) -> None:
        """Count a planned step; moves planned so far precede the step."""
        self._launched += 1

    def committed(self) -> None:
        """Count the success of the oldest step in flight."""
        self._committed += 1
        self.prove()

    def prove(self) -> None:
        """Publish written blocks that no longer depend on a step in flight."""
        while self._unproven and self._unproven[0][0] <= self._committed:
            _, at, entry = self._unproven.popleft()
            if self._levels[at].tier.prove(entry):
                self._levels[at].publish(entry)

    def written(self, at: int, slot: int, ok: bool) -> None:
        """Record that a store has written a slot."""
        entry = self._levels[at].tier.written(slot, ok)
        if entry is not None:
            self._levels[at].publish(entry)

    def reset(self) -> None:
        """Discard blocks saved since the last successful step, after a failure."""
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
        """Return the count of launched steps."""
        return self._launched

    def has_ended(self, launched: int) -> bool:
        """Return whether the first `launched` steps have ended well."""
        return launched <= self._committed

    # ------------------------------------------------------------ before a stop

    def spill(self) -> Iterator[None]:
        """Plan moves that save the tree, the most recently used first, then faster levels, to the
        last.

        No step may be in flight. Yields when space runs out: the caller makes the moves and waits
        for the writes before the generator continues.
        """
        last = len(self._levels) - 1
        if last < 0:
            return
        level = self._levels[last]
        order: list[bytes] = []
        nodes = sorted(_nodes(self._tree), key=lambda one: one.last_use, reverse=True)
        for node in nodes:
            for label, block in reversed(self._whole_blocks(node, node.start)):
                if level.store.writable_slots <= 0:
                    yield
                if len(order) >= level.tier.num_slots:
                    break
                if label.key in level.tier or self._save(last, label, (SAVE, block)):
                    order.append(label.key)
        for upper in self._levels[:last][-1:]:
            for entry in reversed(list(upper.tier.entries())):
                if level.store.writable_slots <= 0:
                    yield
                if entry.whole and entry.label.key not in level.tier:
                    self._save(last, entry.label, (PASS, entry.slot))
        yield
        for key in reversed(order):
            level.tier.keep_longer(key)


def _nodes(tree: RadixTree) -> list[Node]:
    """Return all nodes except roots, each behind its parent."""
    nodes = list(tree.roots.values())
    for node in nodes:  # the list grows meanwhile
        nodes.extend(node.children.values())
    return [node for node in nodes if not node.is_root]
