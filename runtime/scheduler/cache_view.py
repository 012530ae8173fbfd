"""The cache as it is explained and shown, with the times that takes: of prompts, and of ticks."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import msgspec
import numpy as np

from rootlace.runtime.cache import Pin
from rootlace.runtime.contracts.request import adapter_and_namespace
from rootlace.runtime.contracts.tree_page import PinnedPrefix, TreePage
from rootlace.runtime.scheduler.flight import Flight
from rootlace.runtime.scheduler.kv import KVStore
from rootlace.runtime.scheduler.pace import PromptPace, TickTimes
from rootlace.runtime.scheduler.running import RunningSet
from rootlace.runtime.scheduler.tree_page import tree_page
from rootlace.wire.cache_report import CacheReport, Scope


class CacheView:
    """Looks at the cache and changes nothing."""

    def __init__(
        self, kv: KVStore, running: RunningSet, clock: Callable[[], float], pace: PromptPace
    ) -> None:
        self.pace = pace
        self._kv = kv
        self._running = running
        self._clock = clock
        self._ticks = TickTimes()
        self._committed = 0.0

    def note_step(self, flight: Flight, now: float) -> float:
        """A step is committed; returns how many seconds it took."""
        plan, seconds = flight.plan, now - max(flight.begun, self._committed)
        self.pace.note(plan.num_tokens, len(plan.samples), seconds)
        self._ticks.note(self._kv.tree.tick, now)
        self._committed = now
        return seconds

    def explain(self, namespace: Hashable, tokens: np.ndarray, scope: Scope) -> CacheReport:
        """Why the prompt `tokens` (int32) would be cached as far as it would be, if it came now."""
        report = self._kv.explain(namespace, tokens, len(tokens) - 1, scope)
        saved = self.pace.seconds(report.matched)
        return msgspec.structs.replace(report, saved_seconds=saved)

    def tree_page(self, namespace: str | None, under: int, limit: int) -> TreePage:
        """At most `limit` nodes of the tree: see `scheduler.tree_page`."""
        now = self._clock()
        return tree_page(
            self._kv.tree,
            self._running.sequences,
            self._kv.retention.pins.all(),
            lambda node: self._ticks.seconds_since(node.last_use, now),
            self._kv.tiering.fetching.restored,
            namespace=namespace,
            under=under,
            limit=limit,
        )

    def pins(self) -> tuple[PinnedPrefix, ...]:
        """What is pinned now, those that end first."""
        self._kv.retention.expire()
        pins = sorted(self._kv.retention.pins.all(), key=lambda pin: pin.until)
        return tuple(map(self._pinned, pins))

    def _pinned(self, pin: Pin) -> PinnedPrefix:
        adapter, namespace = adapter_and_namespace(pin.namespace)
        left = pin.until - self._clock()
        return PinnedPrefix(pin.id, namespace, adapter, pin.tokens, pin.node.uid, left)
