"""The scheduler's view of the offload levels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np

from rootlace.runtime.cache.journal import prefix_keys
from rootlace.runtime.cache.radix_tree import RadixTree
from rootlace.runtime.scheduler.offload.fetching import Fetching
from rootlace.runtime.scheduler.offload.levels import Level, Moves, Saving, Tiers, owner_of
from rootlace.runtime.scheduler.offload.transfer import Handing
from rootlace.runtime.scheduler.request import RequestState


class Tiering:
    """Join of saving evicted blocks, fetching for prompts, and transfer between engines.

    Blocks move by an ordered list of *moves*, made before the next step is launched. So each move
    sees the pool of its planning time. Without tiers every method does nothing.
    """

    def __init__(
        self, tree: RadixTree, tiers: Tiers, make_room: Callable[[int, RequestState], bool]
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self.levels = tiers.levels
        """Levels that receive evicted blocks, the fastest first."""
        self.active = bool(tiers.readable)
        """Whether there is a level at all."""
        self.moves = Moves()
        self.saving = Saving(tree, tiers, self.moves)
        self.fetching = Fetching(tree, tiers, self.moves, make_room)
        self.handing = Handing(tree, tiers, self.moves, self.saving)
        self._shared: list[RequestState] = []
        """Requests admitted since the last `poll`."""
        self._eager = next((at for at, one in enumerate(self.levels) if one.eager), None)
        self._growing: dict[RequestState, int] = {}
        """Map from running sequence with blocks in an eager level to the number of these blocks."""
        if tiers.levels:
            tree.losing = self.saving.losing
        if tiers.readable:
            tree.expiring = self.expire_later
            tree.forgetting = self.forget

    def poll(self) -> None:
        """Take in finished reads and writes, before a step is planned."""
        for at, level in enumerate(self._tiers.readable):
            for done in level.store.poll():
                if done.read:
                    self.fetching.was_read(at, done.slot, done.ok)
                elif level is self._tiers.handed:
                    self.handing.written(done.slot, done.ok)
                else:
                    self.saving.written(at, done.slot, done.ok)
        self.saving.prove()
        # Their blocks may have been planned in the step of their admission: now they are computed.
        size = self._tree.block_size
        for sequence in self._shared:
            count = min(sequence.cached_tokens // size, sequence.table_len)
            if count and self.levels and self.levels[-1].outlives and not sequence.finished:
                self.saving.ahead(len(self.levels) - 1, sequence, 0, count)
        self._shared.clear()
        if self._eager is not None:
            for sequence, first in self._growing.items():
                count = min(sequence.computed, sequence.length) // size
                if count > first:
                    self.saving.ahead(self._eager, sequence, first, count)
                    self._growing[sequence] = count
        self.handing.poll()
        self.fetching.land_all()

    def spill(self) -> Iterator[np.ndarray]:
        """Yield moves that save worthwhile blocks to the last level before a stop, without a step
        in flight.

        The caller makes each batch and waits for the writes before requesting more.
        """
        for _ in self.saving.spill():
            yield self.moves.take()
            self.poll()

    def reset(self) -> None:
        """Forget moves after a step failed and all KV was lost."""
        self._shared.clear()
        self._growing.clear()
        self.fetching.reset()
        self.handing.reset()
        self.saving.reset()
        self.saving.mortal.clear()
        self.moves.rows.clear()
        self.moves.loads.clear()

    def let_go(self, sequence: RequestState) -> None:
        """Release the blocks and offers of a sequence that was admitted or ended."""
        cache = sequence.request.handling.cache
        if sequence.finished:
            self._growing.pop(sequence, None)
        else:
            self._shared.append(sequence)
            if self._eager is not None and (cache.ttl is None or cache.pin):  # nothing expires
                self._growing[sequence] = 0
        self.fetching.let_go(sequence)
        self.handing.drop(sequence.rid)

    def give_up(self) -> None:
        """Release the blocks held for waiting requests and for other engines."""
        self.fetching.give_up()
        self.handing.give_up()

    @property
    def waiting(self) -> bool:
        """Return whether the loop waits for reads or writes of a store."""
        return self.fetching.waiting or self.handing.busy

    def expire_later(self, namespace: Hashable, tokens: np.ndarray, start: int) -> None:
        """Exclude the blocks of `tokens` (int32) from position `start` on from saving, until
        `forget`.

        Levels that outlive the process lose the blocks, since another request may have saved them.
        """
        keys = self._keys(namespace, tokens, start)
        self.saving.mortal.update(keys)
        _discard(keys, [level for level in self.levels if level.outlives])

    def forget(self, namespace: Hashable, tokens: np.ndarray, start: int) -> None:
        """Forget the blocks of `tokens` (int32) from position `start` on."""
        keys, mortal = self._keys(namespace, tokens, start), self.saving.mortal
        for key in keys:
            mortal[key] -= 1
            if not mortal[key]:
                del mortal[key]
        _discard(keys, self._tiers.readable)

    def _keys(self, namespace: Hashable, tokens: np.ndarray, start: int) -> list[bytes]:
        size = self._tree.block_size
        return prefix_keys(self._tiers.space_of(namespace), tokens, size, start // size)

    def forget_namespace(self, namespace: str) -> None:
        """Forget all blocks of a namespace, with any adapter."""
        owner = owner_of(namespace)
        for level in self._tiers.readable:
            level.discard([one for one in level.tier.entries() if one.label.owner == owner])

    def flush(self) -> None:
        """Forget all blocks."""
        self.give_up()
        for level in self._tiers.readable:
            level.discard(list(level.tier.entries()))
            level.tier.unwanted.clear()

    def wanted_slots(self) -> dict[int, bool]:
        """Return readable slots of the last level in order of eviction, with whether a request
        asked for the block."""
        entries = [one for level in self.levels[-1:] for one in level.tier.entries()]
        return {entry.slot: entry.wanted for entry in entries if entry.whole}

    def stats(self) -> dict[str, int | float]:
        """Return the statistics of the offload levels; empty without levels."""
        stats: dict[str, int | float] = {}
        for name in self._tiers.failed:
            stats |= {f"{name}_working": 0, f"{name}_failed": 1}
        for level in self._tiers.readable:
            stats |= {
                "restored_tokens": self.fetching.restored_tokens,
                f"{level.name}_blocks": len(level.tier),
                f"{level.name}_dropped_blocks": level.tier.dropped,
            }
            stats |= {f"{level.name}_{name}": n for name, n in level.store.stats().items()}
        if self._tiers.handed is not None:
            stats["handed_given_blocks"] = self.handing.given_blocks
        return stats

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        readers = self.fetching.readers()
        for at, level in enumerate(self._tiers.readable):
            level.tier.check()
            for entry in level.tier.entries():
                assert (entry.readers > 0) == ((at, entry.slot) in readers), f"readers of {entry}"


def _discard(keys: Iterable[bytes], levels: Iterable[Level]) -> None:
    for level in levels:
        entries = [level.tier.get(key) for key in keys]
        level.discard([entry for entry in entries if entry is not None])
