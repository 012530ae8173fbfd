"""Requests that wait for their constraint to be compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.contracts.request import Request
from rootlace.wire.protocol import Constraint

FIRST = Constraint("choices", '["a"]')
"""What is compiled before anybody asks: to read the vocabulary takes time."""
AT_ONCE = 16
"""What a turn of the loop takes of those that are ready: beginning a constraint takes time."""


class Compiler(Protocol):
    """What the loop asks of `constrained.service.CompileService`. `vocabulary`: once something is
    compiled."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def cached(self, constraint: Constraint) -> Grammar | None: ...

    def submit(self, constraint: Constraint, client: str = ...) -> Future[Grammar]: ...


@dataclass(frozen=True, eq=False)
class Waiting:
    request: Request
    grammar: Future[Grammar]
    since: float

    @property
    def waited(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self.since


class CompilingRequests:
    """Keeps requests aside while others go on; `take` returns those whose grammar is ready."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._by_rid: dict[int, Waiting] = {}
        self._done: SimpleQueue[int] = SimpleQueue()
        self._ready: list[int] = []
        self.compiled = 0
        """Requests that have waited for their constraint, and for how many seconds in all."""
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: int) -> bool:
        return rid in self._by_rid

    def add(self, request: Request, constraint: Constraint) -> None:
        """Have the request's `constraint` compiled, unless that is under way already."""
        grammar = self._compiler.submit(constraint, request.client)
        rid = request.rid
        self._by_rid[rid] = Waiting(request, grammar, time.monotonic())
        # Not what waits: it would be kept, with its grammar, until a full collection of garbage.
        grammar.add_done_callback(lambda _: self._done.put(rid))

    def remove(self, rid: int) -> bool:
        """Forget an aborted request; False if it is not here. Compilation goes on, since others
        may want the same constraint."""
        return self._by_rid.pop(rid, None) is not None

    def wait(self, seconds: float) -> None:
        """Until something is compiled, at most `seconds`."""
        if self._ready:
            return
        try:
            self._ready.append(self._done.get(timeout=seconds))
        except Empty:
            return

    def take(self) -> Iterator[Waiting]:
        """Requests whose compilation has ended, well or badly: the first `AT_ONCE` of them."""
        while not self._done.empty():
            self._ready.append(self._done.get())
        ready, self._ready = self._ready[:AT_ONCE], self._ready[AT_ONCE:]
        for rid in ready:
            waiting = self._by_rid.get(rid)
            if waiting is not None and waiting.grammar.done():
                del self._by_rid[rid]
                self.compiled += 1
                self.seconds += waiting.waited
                yield waiting
