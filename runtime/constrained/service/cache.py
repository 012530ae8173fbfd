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

    def get(self, key: Hashable) -> Grammar | None:
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
            return grammar

    def get_or_build(self, key: Hashable, build: Callable[[], Grammar]) -> Grammar:
        """The grammar of `key`, built once however many threads ask at the same time.

        Raises what `build` raises, in all of these threads; who asks later builds again.
        """
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
                return grammar
            own = key not in self._building
            building = self._building.setdefault(key, Future())
        if own:
            try:
                grammar = build()
                with self._lock:
                    self._grammars[key] = grammar
                    self._evict()
                    del self._building[key]
                building.set_result(grammar)
            except BaseException as error:
                del self._building[key]
                building.set_exception(error)
        return building.result()

    def _evict(self) -> None:
        """Oldest first; the one used last stays whatever its size."""
        total = sum(grammar.nbytes for grammar in self._grammars.values())
        while len(self._grammars) > 1 and (
            len(self._grammars) > self._max_entries or total > self._max_bytes
        ):
            _, gone = self._grammars.popitem(last=False)
            total -= gone.nbytes
