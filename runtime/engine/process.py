"""Services of the engine process: compiling requests, loading progress, reports.

Sections: compiling requests, loading, telling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TextIO

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.contracts.messages import (
    CacheChanged,
    CostMeasured,
    EngineRequest,
    FromEngine,
)
from rootlace.runtime.scheduler.inspection import CacheControl
from rootlace.runtime.scheduler.pacing import MeasuredCost
from rootlace.wire.protocol import Constraint

if TYPE_CHECKING:
    from rootlace.runtime.engine.constraints import LateCompiler

FIRST = Constraint("choices", '["a"]')
"""Constraint compiled for a request that needs the vocabulary and has no constraint."""
AT_ONCE = 16
"""Ready requests taken per turn of the loop: beginning a constraint takes time."""


class CompilingRequests:
    """Requests whose grammars are not ready yet; `take` returns ready ones."""

    def __init__(self, compiler: LateCompiler) -> None:
        self._compiler = compiler
        self.by_rid: dict[int, tuple[EngineRequest, Future[Grammar], float]] = {}
        """Waiting requests by id: request, future grammar, and start time of the wait."""
        self._done: SimpleQueue[int] = SimpleQueue()
        self._ready: list[int] = []
        self.compiled = 0
        """Count of requests that waited for their constraint, and total seconds waited."""
        self.seconds = 0.0

    def add(self, request: EngineRequest, constraint: Constraint) -> None:
        """Compile the request's `constraint`, unless the compilation is under way already."""
        grammar = self._compiler.submit(constraint, request.client)
        rid = request.rid
        self.by_rid[rid] = request, grammar, time.monotonic()
        # Not the request: it would be kept, with its grammar, until a full garbage collection.
        grammar.add_done_callback(lambda _: self._done.put(rid))

    def remove(self, rid: int) -> bool:
        """Forget an aborted request; False if it is not here.

        The compilation goes on, since other requests may want the same constraint.
        """
        return self.by_rid.pop(rid, None) is not None

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until a constraint is compiled."""
        if self._ready:
            return
        try:
            self._ready.append(self._done.get(timeout=seconds))
        except Empty:
            return

    def take(self) -> Iterator[tuple[EngineRequest, Callable[[], Matcher], float]]:
        """Yield the first `AT_ONCE` requests whose compilation has ended, well or badly.

        Each comes with a function that makes its matcher or raises the compilation's error, and
        with the seconds waited.
        """
        while not self._done.empty():
            self._ready.append(self._done.get())
        ready, self._ready = self._ready[:AT_ONCE], self._ready[AT_ONCE:]
        for rid in ready:
            if rid not in self.by_rid or not self.by_rid[rid][1].done():
                continue
            request, grammar, since = self.by_rid.pop(rid)
            waited = time.monotonic() - since
            self.compiled += 1
            self.seconds += waited
            yield request, partial(_matcher, grammar), waited


def _matcher(grammar: Future[Grammar]) -> Matcher:
    return grammar.result().matcher()


# Loading ------------------------------------------------------------------------------------------


WIDTH = 30
"""Characters of a bar."""
SECONDS = 2.0
"""Seconds between two lines of a log."""

log = logging.getLogger(__name__)


def loading_bar(stream: TextIO) -> Callable[[str, float], None]:
    """Report progress as a bar in one line of a terminal: the activity, and the share of weights
    read."""

    def tell(what: str, fraction: float) -> None:
        done = round(WIDTH * fraction)
        bar = "#" * done + "." * (WIDTH - done)
        end = "\n" if fraction >= 1 else ""
        stream.write(f"\rloading [{bar}] {fraction:4.0%} {what}\x1b[K{end}")
        stream.flush()

    return tell


def loading_log(clock: Callable[[], float] = time.monotonic) -> Callable[[str, float], None]:
    """Report progress as lines of a log, without a terminal; no lines for a model read at once."""
    logged = clock()

    def tell(what: str, fraction: float) -> None:
        nonlocal logged
        if clock() - logged >= SECONDS:
            logged = clock()
            log.info("loading weights: %.0f %% (%s)", 100 * fraction, what)

    return tell


# Telling ------------------------------------------------------------------------------------------


_NONE = np.empty(0, np.uint64)
_STEPS = 256
"""Steps between two reports of cost; the first reports come after 2, 4, 8, ... steps."""


class Telling:
    """Reports to the router: changes of the cache, and measured cost of steps."""

    def __init__(
        self, cache: CacheControl, measured: MeasuredCost, digest_key: bytes = b""
    ) -> None:
        cache.keep_journal(digest_key)
        self._cache = cache
        self._cost = measured
        self._next_cost = 2
        self._number = 0
        self._all_of_it = False

    def tell_all(self) -> None:
        """Report the whole content of the cache next."""
        self._all_of_it = True

    def take(self) -> list[FromEngine]:
        """Return the reports to send now; often none."""
        messages: list[FromEngine] = []
        change = self._cache.changes(self._all_of_it)
        below = self._cache.changes_below(change is not None and change.fresh)
        if change is not None or below:
            change = change or Change(_NONE, _NONE)
            self._all_of_it = False
            self._number += 1
            message = CacheChanged(
                self._number, change.added, change.removed, change.fresh, below, change.blocks
            )
            messages.append(message)
        if self._cost.steps >= self._next_cost:
            self._next_cost = self._cost.steps + min(self._cost.steps, _STEPS)
            messages.append(CostMeasured(self._cost.cost))
        return messages
