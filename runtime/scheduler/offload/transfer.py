"""Blocks on their way from one engine's tree to another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.cache import Node, RadixTree
from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.tier import Entry, Label
from rootlace.runtime.contracts.block_store import SAVE
from rootlace.runtime.scheduler.offload.levels import Moves, Saving, Tiers, owner_of

_MOST_OFFERS = 4096
"""Of requests that never came."""


@dataclass(eq=False)
class _Giving:
    """Blocks of a prompt that are put into slots which were given for them: `blocks` of the pool
    with their keys, those before `planned` are on their way. The handle `node` holds them. It is
    `void` where nobody knows any more what they hold."""

    ticket: int
    node: Node | None
    blocks: list[tuple[bytes, int]]
    slots: Sequence[int]
    planned: int = 0
    launched: int = 0
    checksums: dict[int, int | None] = field(default_factory=dict)
    """By slot, of those that were written; None where that went wrong, or never began."""
    void: bool = False

    @property
    def written(self) -> bool:
        return self.planned == len(self.blocks) == len(self.checksums)

    def leading(self) -> tuple[int, ...]:
        """Checksums of the blocks up to the first that was not written."""
        found: list[int] = []
        for slot in () if self.void else self.slots[: self.planned]:
            crc = self.checksums.get(slot)
            if crc is None:
                break
            found.append(crc)
        return tuple(found)


class Handing:
    """Gives blocks to other engines and takes those that they give, by way of `Tiers.handed`.

    What is given is read like what is on a disk (`Fetching`): by its key, which says whose it is
    and what is before it, and only if its checksum, which covers the key, is right. What is offered
    for a request is forgotten when that is admitted or over.
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
        """Slots that are being written, or will be."""
        self._answers: list[tuple[int, tuple[int, ...]]] = []
        self._offered: OrderedDict[int, list[Entry]] = OrderedDict()
        self.given_blocks = 0

    # ------------------------------------------------------------ giving

    def give(
        self, ticket: int, namespace: Hashable, tokens: np.ndarray, first: int, slots: Sequence[int]
    ) -> None:
        """Put the blocks from number `first` on of `tokens` (int32), as far as they are cached,
        into `slots` that others know. `take_answers` says when it is done. Nothing is given into
        slots that something is still written to."""
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
        node.fill_table(table, cached, size)
        keys = prefix_keys(self._tiers.space_of(namespace), tokens[: cached * size], size, first)
        blocks = list(zip(keys, table[first:].tolist(), strict=True))
        giving = _Giving(ticket, node, blocks, slots)
        self._givings.append(giving)
        self._by_slot |= dict.fromkeys(slots[: len(blocks)], giving)

    def poll(self) -> None:
        """Plan moves of what is to be given, as far as the store has room, and answer where all was
        written by steps that ended well."""
        handed = self._tiers.handed
        for giving in list(self._givings):
            assert handed is not None
            if not handed.store.working:  # nothing more is written
                self._stop(giving)
            while giving.planned < len(giving.blocks) and handed.store.room > 0:
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
        """The store has written a slot."""
        giving = self._by_slot.pop(slot, None)
        handed = self._tiers.handed
        if giving is not None and handed is not None:
            giving.checksums[slot] = handed.store.checksum(slot) if ok else None

    def take_answers(self) -> list[tuple[int, tuple[int, ...]]]:
        """Tickets, and the checksums of the blocks that lie in the first of the slots."""
        if not self._answers:
            return []
        answers, self._answers = self._answers, []
        return answers

    def give_up(self) -> None:
        """Hold nothing any more: what is not planned yet is not given."""
        for giving in self._givings:
            self._stop(giving)
            self._leave(giving)

    @property
    def busy(self) -> bool:
        """Whether something is being given, or to be answered."""
        return bool(self._givings or self._answers)

    def nodes(self) -> list[Node]:
        """Where handles end."""
        return [giving.node for giving in self._givings if giving.node is not None]

    def reset(self) -> None:
        """A step failed, and all KV is lost, the tree and its handles too. What is being given is
        answered with nothing once none of it is being written any more."""
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
        """What is not planned yet is not given."""
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
        given: Sequence[tuple[int, int]],
        source: bytes = b"",
    ) -> None:
        """For a request to come: the blocks from number `first` on of `tokens` (int32) are in these
        slots of the giver `source`, and have these checksums."""
        handed = self._tiers.handed
        if handed is None:
            return
        end = (first + len(given)) * self._size
        keys = prefix_keys(self._tiers.space_of(namespace), tokens[:end], self._size, first)
        entries = self._offered[rid] = []
        for key, (place, crc) in zip(keys, given, strict=False):
            known = handed.tier.get(key)
            if known is not None and known.readers:
                continue  # it comes for somebody else
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
        """Forget what was offered for a request."""
        handed = self._tiers.handed
        for entry in self._offered.pop(rid, ()):
            assert handed is not None
            if handed.tier.get(entry.label.key) is entry:
                handed.tier.discard(entry)
