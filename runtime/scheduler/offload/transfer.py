"""Block transfer between the trees of two engines: prefill here, decode there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import RadixTree
from rootlace.runtime.cache.tier import Entry, Label
from rootlace.runtime.contracts.block_store import SAVE
from rootlace.runtime.scheduler.offload.levels import Moves, Saving, Tiers, owner_of

_MOST_OFFERS = 4096
"""Most offers kept for requests that never arrived."""


@dataclass(eq=False)
class _Giving:
    """Write of a prompt's blocks into slots that a receiver reserved.

    `blocks`: blocks of the pool with their keys; blocks before `planned` are being written. The
    handle `node` holds the blocks. `void`: the contents of the blocks are unknown after a failure.
    """

    ticket: int
    node: Node | None
    blocks: list[tuple[bytes, int]]
    slots: Sequence[int]
    planned: int = 0
    launched: int = 0
    checksums: dict[int, int | None] = field(default_factory=dict)
    """Slot -> checksum of the written block; None if the write failed or never began."""
    void: bool = False

    @property
    def written(self) -> bool:
        return self.planned == len(self.blocks) == len(self.checksums)

    def leading(self) -> tuple[int, ...]:
        """Return the checksums of the blocks before the first unwritten one."""
        sums: list[int] = []
        for slot in () if self.void else self.slots[: self.planned]:
            crc = self.checksums.get(slot)
            if crc is None:
                break
            sums.append(crc)
        return tuple(sums)


class Handing:
    """Transfer of blocks to and from other engines, through `Tiers.handed`.

    A transferred block is read like a block on disk (`Fetching`): by the key, which identifies the
    namespace and all tokens before. The checksum, which covers the key, must be right. An offer for
    a request is forgotten when the request is admitted or ends.
    """

    def __init__(self, tree: RadixTree, tiers: Tiers, moves: Moves, saving: Saving) -> None:
        self._tree = tree
        self._size = tree.block_size
        self._tiers = tiers
        self._at = len(tiers.levels)
        self._moves = moves
        self._saving = saving
        self._givings: list[_Giving] = []
        self._by_slot: dict[int, _Giving] = {}
        """Slots being written or planned to be written."""
        self._answers: list[tuple[int, tuple[int, ...]]] = []
        self._offered: OrderedDict[int, list[Entry]] = OrderedDict()
        self.given_blocks = 0

    # ------------------------------------------------------------ giving

    def give(
        self, ticket: int, namespace: Hashable, tokens: np.ndarray, first: int, slots: Sequence[int]
    ) -> None:
        """Write the cached blocks from number `first` on of `tokens` (int32) into `slots`.

        `take_answers` reports the end. A slot with an unfinished write is refused.
        """
        size, end = self._size, first + len(slots)
        cached = 0
        handed = self._tiers.handed
        if handed and handed.store.working and self._by_slot.keys().isdisjoint(slots):
            cached = self._tree.descend(namespace, tokens, end * size)[1] // size
        if cached <= first:
            self._answers.append((ticket, ()))
            return
        node = self._tree.advance(self._tree.enter(namespace), tokens, cached * size)
        table = np.zeros(cached, np.int32)
        self._tree.fill_table(node, table, cached)
        keys = prefix_keys(self._tiers.space_of(namespace), tokens[: cached * size], size, first)
        blocks = list(zip(keys, table[first:].tolist(), strict=True))
        giving = _Giving(ticket, node, blocks, slots)
        self._givings.append(giving)
        self._by_slot |= dict.fromkeys(slots[: len(blocks)], giving)

    def poll(self) -> None:
        """Plan the moves of gifts as far as the store has room, and answer finished gifts.

        A gift is finished when its blocks were written by steps that ended well.
        """
        handed = self._tiers.handed
        for giving in list(self._givings):
            assert handed is not None
            if not handed.store.working:  # no further write will end
                self._stop(giving)
            while giving.planned < len(giving.blocks) and handed.store.writable_slots > 0:
                key, block = giving.blocks[giving.planned]
                slot = giving.slots[giving.planned]
                handed.store.reserve(slot, key)
                self._moves.rows.append((SAVE, self._at, slot, block))
                giving.planned += 1
                giving.launched = self._saving.now
            if giving.written and (giving.void or self._saving.has_ended(giving.launched)):
                self._end(giving)
                self._answers.append((giving.ticket, giving.leading()))
                self.given_blocks += len(giving.leading())

    def written(self, slot: int, ok: bool) -> None:
        """Record that the store has written a slot."""
        giving = self._by_slot.pop(slot, None)
        handed = self._tiers.handed
        if giving is not None and handed is not None:
            giving.checksums[slot] = handed.store.checksum(slot) if ok else None

    def take_answers(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return tickets with the checksums of the blocks in the leading slots."""
        if not self._answers:
            return []
        answers, self._answers = self._answers, []
        return answers

    def give_up(self) -> None:
        """Release all handles; blocks not planned yet are not given."""
        for giving in self._givings:
            self._stop(giving)
            self._leave(giving)

    @property
    def busy(self) -> bool:
        """Return whether a gift is being written or unanswered."""
        return bool(self._givings or self._answers)

    def nodes(self) -> list[Node]:
        """Return the nodes at which handles of gifts end."""
        return [giving.node for giving in self._givings if giving.node is not None]

    def reset(self) -> None:
        """Forget all gifts after a step failed and the KV, the tree and its handles were lost.

        A gift in progress is answered with no checksums once none of its slots is being written.
        """
        handed = self._tiers.handed
        for row in self._moves.rows:
            if row[0] == SAVE and row[1] == self._at and handed is not None:
                handed.store.cancel(row[2])
                self._by_slot.pop(row[2]).checksums[row[2]] = None
        self._moves.rows = [row for row in self._moves.rows if row[:2] != (SAVE, self._at)]
        for giving in self._givings:
            giving.node, giving.void = None, True
            self._stop(giving)
        self.poll()

    def _stop(self, giving: _Giving) -> None:
        """Drop the unplanned blocks of a gift."""
        for slot in giving.slots[giving.planned : len(giving.blocks)]:
            del self._by_slot[slot]
        giving.blocks = giving.blocks[: giving.planned]

    def _end(self, giving: _Giving) -> None:
        self._givings.remove(giving)
        self._leave(giving)

    def _leave(self, giving: _Giving) -> None:
        if giving.node is not None:
            self._tree.leave(giving.node)
            giving.node = None

    # ------------------------------------------------------------ taking

    def offer(
        self,
        rid: int,
        namespace: Hashable,
        tokens: np.ndarray,
        first: int,
        slots: Sequence[tuple[int, int]],
        source: bytes = b"",
    ) -> None:
        """Offer blocks to a request to come: blocks from number `first` on of `tokens` (int32).

        `slots`: (slot, checksum) of each block in the slots of the engine `source`.
        """
        handed = self._tiers.handed
        if handed is None:
            return
        end = (first + len(slots)) * self._size
        keys = prefix_keys(self._tiers.space_of(namespace), tokens[:end], self._size, first)
        entries = self._offered[rid] = []
        for key, (place, crc) in zip(keys, slots, strict=False):
            known = handed.tier.get(key)
            if known is not None and known.readers:
                continue  # the slot serves another request
            if known is not None:
                handed.tier.discard(known)
            entry = handed.tier.add(Label(key, owner_of(namespace)))
            if entry is None:
                break
            entry.written = entry.proven = True
            handed.store.offer(entry.slot, source, place, crc)
            entries.append(entry)
        if len(self._offered) > _MOST_OFFERS:
            self.drop(next(iter(self._offered)))

    def drop(self, rid: int) -> None:
        """Forget the offers for a request."""
        handed = self._tiers.handed
        for entry in self._offered.pop(rid, ()):
            assert handed is not None
            if handed.tier.get(entry.label.key) is entry:
                handed.tier.discard(entry)
