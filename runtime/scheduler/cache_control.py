"""What is asked of the cache itself, between steps and for no request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from rootlace.runtime.cache.digest import PrefixDigests
from rootlace.runtime.cache.journal import Change, Journal
from rootlace.runtime.contracts.messages import Below
from rootlace.runtime.contracts.request import adapter_and_namespace
from rootlace.runtime.scheduler.kv import KVStore
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.runtime.scheduler.tiers.level_journals import LevelJournals


class CacheControl:
    """Forgets prefixes, and lets pins and programs go."""

    def __init__(
        self, kv: KVStore, sequences: Mapping[int, Sequence], changed: Callable[[], None]
    ) -> None:
        """`sequences`: all that are here, by request id. `changed` is called after a change."""
        self._kv = kv
        self._sequences = sequences
        self._changed = changed
        self._below = LevelJournals(())
        self._forgotten: set[Hashable] = set()
        """What is to be forgotten when its last request ends."""

    def flush(self) -> None:
        """Forget every prefix that no running request uses."""
        self._kv.tree.flush()
        self._kv.tiering.flush()
        self._changed()

    def forget_namespace(self, namespace: str) -> None:
        """Forget what a namespace holds, with any adapter; what requests use, when they end."""
        known = {*self._kv.tree.roots, *(one.namespace for one in self._sequences.values())}
        for kv in known:
            if adapter_and_namespace(kv)[1] == namespace:
                self._forget(kv)
        self._kv.tiering.forget_namespace(namespace)
        self._changed()

    def unpin(self, pin: str, namespace: str | None = None) -> bool:
        """Let a pin of this namespace (None: of any) go; False if there is none of this id."""
        self._kv.retention.expire()
        released = any(
            one.id == pin and namespace in (None, adapter_and_namespace(one.namespace)[1])
            for one in self._kv.retention.pins.all()
        ) and self._kv.retention.pins.release(pin)
        self._changed()
        return released

    def release_program(self, program: str, wanted: bool = False) -> None:
        """The program ended: prefixes that only it used may go first, unless they are `wanted`."""
        self._kv.tree.close_program(program, wanted)

    def keep_journal(self, key: bytes = b"") -> None:
        """From now on `changes` says what the cache, which is empty, holds: digests by `key`."""
        tree = self._kv.tree
        tree.evicted.digests = PrefixDigests(key)
        tree.journal = Journal(tree.block_size, tree.evicted.digests)
        self._below = LevelJournals(self._kv.tiering.levels)

    def changes(self, all_of_it: bool = False) -> Change | None:
        """What is held and was not when this was asked last, and the reverse, or `all_of_it`; None
        if nothing changed, or no journal is kept."""
        tree = self._kv.tree
        if tree.journal is None:
            return None
        if all_of_it:
            return tree.journal.snapshot(tree.roots.values())
        return tree.journal.take() if tree.journal.changed else None

    def changes_below(self, all_of_it: bool = False) -> tuple[Below, ...]:
        """The same of what lies below the pool."""
        return self._below.take(all_of_it)

    def request_ended(self, namespace: Hashable) -> None:
        """A request of `namespace` is over and no longer among the sequences."""
        if namespace in self._forgotten:
            self._forget(namespace)
            self._kv.tiering.forget_namespace(adapter_and_namespace(namespace)[1])

    def _forget(self, kv: Hashable) -> None:
        self._kv.tree.forget_namespace(kv)
        if any(sequence.namespace == kv for sequence in self._sequences.values()):
            self._forgotten.add(kv)
        else:
            self._forgotten.discard(kv)
