"""Compiled grammars by what they were compiled from, shared by the requests that ask for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from rootlace.runtime.contracts.matcher import Grammar


class GrammarCache:
    """The most recently used grammars: at most `max_entries`, and about `max_bytes`. Thread-safe.

    A grammar that somebody still uses lives on when it leaves the cache.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[Hashable, Grammar] = OrderedDict()
        self._building: dict[Hashable, Future[Grammar]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._grammars)

    @property
    def nbytes(self) -> int:
        """About the memory of what is kept; it grows as automata are visited."""
        with self._lock:
            return sum(grammar.nbytes for grammar in self._grammars.values())

    def get(self, key: Hashable) -> Grammar | None:
        with self._lock:
            return self._known(key)

    def _known(self, key: Hashable) -> Grammar | None:
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
        return grammar

    def get_or_build(self, key: Hashable, build: Callable[[], Grammar]) -> Grammar:
        """The grammar of `key`, built at most once however many threads ask at the same time.

        Raises what `build` raises, to all of them; a failure is not kept.
        """
        with self._lock:
            known = self._known(key)
            if known is not None:
                return known
            building = self._building.get(key)
            mine = building is None
            if building is None:
                building = self._building[key] = Future()
        if not mine:
            return building.result()
        try:
            grammar = build()
        except BaseException as error:
            with self._lock:
                del self._building[key]
            building.set_exception(error)
            raise
        with self._lock:
            del self._building[key]
            self._grammars[key] = grammar
            self._evict()
        building.set_result(grammar)
        return grammar

    def _evict(self) -> None:
        """Oldest first; the one used last stays whatever its size."""
        total = sum(grammar.nbytes for grammar in self._grammars.values())
        while len(self._grammars) > 1 and (
            len(self._grammars) > self._max_entries or total > self._max_bytes
        ):
            _, gone = self._grammars.popitem(last=False)
            total -= gone.nbytes
