"""Fetching of blocks from offload levels into the pool and the tree, for prompts that match."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import RadixTree
from rootlace.runtime.cache.tier import Entry
from rootlace.runtime.contracts.block_store import LOAD
from rootlace.runtime.scheduler.offload.levels import Moves, Tiers
from rootlace.runtime.scheduler.request import RequestState

# Fetch --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Fetch:
    """Read of a sequence's blocks from number `first` on, from `slots`: pairs of (level, slot).

    The handle `node` holds the tree blocks before `first` and each fetched block once inserted.
    `stop`: blocks from this number on cannot be read. `over`: no request waits for the fetch.
    """

    sequence: RequestState
    node: Node | None
    first: int
    slots: list[tuple[int, int]]
    stop: int = 0
    landed: int = 0
    """Blocks inserted into the tree so far."""
    read: set[int] = field(default_factory=set)
    over: bool = False

    def __post_init__(self) -> None:
        self.stop = len(self.slots)

    @property
    def finished(self) -> bool:
        return self.over or self.landed >= self.stop

    def next(self) -> int:
        """Count the blocks read behind the inserted ones, without a gap."""
        at = self.landed
        while at < self.stop and at in self.read:
            at += 1
        return at - self.landed


# Fetching -----------------------------------------------------------------------------------------


MOST_FETCHES = 8
"""Most concurrent fetches; a further request asks again when the queue offers it."""

Sought = Literal["nothing", "begun", "busy"]


class Fetching:
    """Fetching of the blocks that prompts match, if reading takes less time than computing.

    A request whose blocks are being read waits until the blocks are in the tree. Each block enters
    the tree when read; a handle holds the block there for the request.
    """

    def __init__(
        self,
        tree: RadixTree,
        tiers: Tiers,
        moves: Moves,
        make_room: Callable[[int, RequestState], bool],
    ) -> None:
        self._tree = tree
        self._pool = tree.pool
        self._size = tree.block_size
        self._tiers = tiers
        self._levels = tiers.readable
        self._moves = moves
        self._make_room = make_room
        self._fetches: dict[int, Fetch] = {}
        self._reading: dict[tuple[int, int], tuple[Fetch, int]] = {}
        """Map from (level, slot) to the fetch that reads the slot, and the block number there."""
        self.restored = np.zeros(self._pool.num_blocks, bool)
        """Blocks of the pool that were read back."""
        self.restored_tokens = 0

    # ------------------------------------------------------------ requests

    def arrived(self, sequence: RequestState) -> None:
        """Start reading blocks for a request on arrival."""
        if len(self._fetches) < MOST_FETCHES:
            self._seek(sequence)

    def holds_back(self, sequence: RequestState) -> bool:
        """Return whether the sequence, offered by the queue, waits for blocks being read."""
        fetch = self._fetches.get(sequence.rid)
        if fetch is not None:
            return not fetch.finished
        if sequence.sought:
            return False
        sought = self._seek(sequence)
        sequence.sought = sought != "busy"
        return sought != "nothing"

    def let_go(self, sequence: RequestState) -> None:
        """Release the blocks read for a sequence that was admitted or ended."""
        fetch = self._fetches.pop(sequence.rid, None)
        if fetch is not None:
            self._end(fetch)

    def give_up(self) -> None:
        """Release the blocks of waiting requests and stop their reads."""
        for fetch in self._fetches.values():
            self._end(fetch)

    def nodes(self) -> list[Node]:
        """Return the nodes at which handles of fetches end."""
        return [fetch.node for fetch in self._fetches.values() if fetch.node is not None]

    @property
    def waiting(self) -> bool:
        """Return whether a request may wait for blocks being read, for itself or for an ended
        request."""
        return bool(self._reading) or any(not one.finished for one in self._fetches.values())

    def reach(self, namespace: Hashable, tokens: np.ndarray, matched: int, limit: int) -> int:
        """Count tokens behind the `matched` ones of `tokens[:limit]` (int32) that can be read."""
        first, last = matched // self._size, limit // self._size
        if first >= last or not any(len(level.tier) for level in self._levels):
            return 0
        space = self._tiers.space_of(namespace)
        end = first
        for key in prefix_keys(space, tokens[: last * self._size], self._size, first):
            if self._tiers.find(key) is None:
                break
            end += 1
        return max(end * self._size - matched, 0)

    def _seek(self, sequence: RequestState) -> Sought:
        """Start reading the sequence's blocks that the tree lacks, if available and worth the time.

        "busy": another request reads the same blocks.
        """
        size, tree = self._size, self._tree
        limit = sequence.match_limit()
        last = limit // size
        if not last or not any(len(level.tier) for level in self._levels):
            return "nothing"
        matched = tree.descend(sequence.namespace, sequence.tokens, limit)[1]
        first = matched // size
        if first >= last:
            return "nothing"
        space = self._tiers.space_of(sequence.namespace)
        keys = prefix_keys(space, sequence.tokens[: last * size], size)
        for level in self._levels:
            level.tier.want(keys)
        entries: list[tuple[int, Entry]] = []
        for key in keys[first:]:
            where = self._tiers.find(key)
            if where is None:
                break
            if where[1].readers:
                if not entries:
                    return "busy"
                break
            entries.append(where)
        counts = [sum(at == level for level, _ in entries) for at in range(len(self._levels))]
        seconds = sum(
            level.store.seconds(count)
            for level, count in zip(self._levels, counts, strict=True)
            if count
        )
        if entries and seconds >= self._tiers.prefill_seconds(len(entries) * size):
            for level in self._levels:
                level.store.refused()
            entries = []
        if not entries:
            return "nothing"
        node = tree.enter(sequence.namespace)
        node = tree.advance(node, sequence.tokens, matched, sequence.program)
        fetch = Fetch(sequence, node, first, [(at, entry.slot) for at, entry in entries])
        for number, (at, entry) in enumerate(entries):
            self._reading[at, entry.slot] = fetch, number
            self._levels[at].tier.begin_read(entry)
            self._levels[at].store.fetch(entry.slot, entry.label.key)
        self._fetches[sequence.rid] = fetch
        return "begun"

    # ------------------------------------------------------------ what was read

    def was_read(self, at: int, slot: int, ok: bool) -> None:
        """Record that a store has read a slot."""
        level = self._levels[at]
        fetch, number = self._reading.pop((at, slot))
        if not ok:
            fetch.stop = min(fetch.stop, number)
            level.tier.end_read(slot, False)
            level.store.erase([slot])
        elif fetch.over or number >= fetch.stop:
            level.release(slot)
        else:
            fetch.read.add(number)

    def land_all(self) -> None:
        """Insert blocks that were read into the pool and the tree."""
        for at, slot in self._moves.taken:
            self._levels[at].tier.end_read(slot, True)
        self._moves.taken = []
        for fetch in self._fetches.values():
            if not fetch.over:
                self._land(fetch)

    def _land(self, fetch: Fetch) -> None:
        wanted = fetch.next()
        count = min(wanted, self._pool.available)
        if count:
            self._insert(fetch, count)
        elif wanted:
            self._end(fetch)
        if fetch.landed >= fetch.stop:
            self._drop_read(fetch)

    def _insert(self, fetch: Fetch, count: int) -> None:
        """Insert the next `count` blocks of `fetch`."""
        assert fetch.node is not None
        sequence = fetch.sequence
        self._make_room(count, sequence)
        blocks = self._pool.allocate(count)
        start = fetch.first + fetch.landed
        end, known = start + count, fetch.node.end
        table = np.zeros(end, np.int32)
        table[start:] = blocks
        fetch.node = self._tree.insert(
            fetch.node, sequence.tokens, end * self._size, table, sequence.program
        )
        self._pool.drop(blocks, pinned=True)
        for number, block in enumerate(blocks.tolist(), fetch.landed):
            at, slot = fetch.slots[number]
            fetch.read.discard(number)
            if self._pool.refs[block]:
                self._moves.rows.append((LOAD, at, slot, block))
                self._moves.loads.append((at, slot))
                self.restored[block] = True
            else:  # computed by another request meanwhile
                self._levels[at].release(slot)
        fetch.landed += count
        sequence.restored += fetch.node.end - known
        self.restored_tokens += fetch.node.end - known

    def _end(self, fetch: Fetch) -> None:
        """Release the handle of `fetch`, and blocks read but not inserted."""
        fetch.over = True
        self._drop_read(fetch)
        if fetch.node is not None:
            self._tree.leave(fetch.node, fetch.sequence.program)
            fetch.node = None

    def _drop_read(self, fetch: Fetch) -> None:
        for number in fetch.read:
            at, slot = fetch.slots[number]
            self._levels[at].release(slot)
        fetch.read.clear()

    def reset(self) -> None:
        """Forget all fetches after the KV, the tree and its handles were lost."""
        for at, slot in self._moves.loads:
            self._levels[at].release(slot)
        for fetch in self._fetches.values():
            fetch.node = None
            self._end(fetch)
        self._fetches.clear()
        self.restored[:] = False

    def readers(self) -> set[tuple[int, int]]:
        """Return (level, slot) of blocks being read, and of blocks read but not yet in the pool."""
        reading = {*self._reading, *self._moves.loads, *self._moves.taken}
        for fetch in self._fetches.values():
            reading |= {fetch.slots[number] for number in fetch.read}
        return reading
