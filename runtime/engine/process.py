"""Requests that wait for their constraint to be compiled."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TextIO

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.contracts.messages import (
    CacheChanged,
    CostMeasured,
    EngineRequest,
    FromEngine,
)
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.inspection import CacheControl
from rootlace.runtime.scheduler.pacing import MeasuredCost
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.sandbox import CompileService
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
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
    request: EngineRequest
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

    def add(self, request: EngineRequest, constraint: Constraint) -> None:
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


# Constraints --------------------------------------------------------------------------------------
#
# What compiles the engine's constraints.


def prepare(compiler: GrammarCompiler) -> None:
    """Have it learn all that it can before it is asked. That stays, so a full collection of garbage
    need not look at it again: for each token of the vocabulary there are objects, and with 150,000
    the loop stood still for 0.13 s each time."""
    compiler.prepare()
    gc.freeze()


def compile_service(runner: ModelRunner, config: ConstraintConfig) -> CompileService:
    """Compiles for the tokens of the runner's model."""

    def compiler() -> GrammarCompiler:
        tokenizer = runner.config.source.tokenizer_json()
        vocabulary = Vocabulary(tokenizer, runner.vocab_size, list(runner.eos_token_ids))
        compiler = GrammarCompiler(vocabulary, config=config)
        # Whoever comes first needs little of it, and learns that little faster than all.
        threading.Thread(target=prepare, args=(compiler,), name="prepare", daemon=True).start()
        return compiler

    service = CompileService(compiler, config)
    # The first compilation reads the whole vocabulary: that is done now, beside the first requests.
    service.submit(FIRST)
    return service


# Garbage ------------------------------------------------------------------------------------------
#
# When the engine's process looks through all its memory for garbage.


IDLE_AFTER = 10
"""Collections of the second generation, of some 7,000 objects each, before all is looked through at
an idle moment. It is Python's own number for any moment."""
BUSY_AFTER = 300
"""And where there has been no idle moment: it holds everybody, for some 0.3 µs an object. What has
come since the last time are 2 million objects at most, and little of it is garbage: requests and
constraints leave no circles (`tests/engine/test_garbage.py`)."""


def collect_when_idle() -> None:
    """From now on; what is here stays, and is not looked at again (0.1 s with a large vocabulary).
    `idle` is to be called where there is nothing else to do."""
    gc.collect()
    gc.freeze()
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, BUSY_AFTER)


def idle() -> bool:
    """Whether all was looked through, since it was time."""
    if gc.get_count()[2] < IDLE_AFTER:
        return False
    gc.collect()
    return True


# Loading ------------------------------------------------------------------------------------------
#
# How much of a model's weights is read, told while it starts.


WIDTH = 30
"""Characters of a bar."""
SECONDS = 2.0
"""Between two lines of a log."""

log = logging.getLogger(__name__)


def loading_bar(stream: TextIO) -> Callable[[str, float], None]:
    """Writes a bar of what is being done and the share of the weights that is read, over and over
    into one line of a terminal."""

    def tell(what: str, fraction: float) -> None:
        done = round(WIDTH * fraction)
        bar = "#" * done + "." * (WIDTH - done)
        end = "\n" if fraction >= 1 else ""
        stream.write(f"\rloading [{bar}] {fraction:4.0%} {what}\x1b[K{end}")
        stream.flush()

    return tell


def loading_log(clock: Callable[[], float] = time.monotonic) -> Callable[[str, float], None]:
    """The same for what is no terminal: a line of the log now and then, of a model that is read at
    once none."""
    told = clock()

    def tell(what: str, fraction: float) -> None:
        nonlocal told
        if clock() - told >= SECONDS:
            told = clock()
            log.info("loading weights: %.0f %% (%s)", 100 * fraction, what)

    return tell


# Telling ------------------------------------------------------------------------------------------
#
# What an engine says of itself to who chooses among several.


_NONE = np.empty(0, np.uint64)
_STEPS = 256
"""Costs are told after 2, 4, 8 and so on steps, and then after each so many more."""


class Telling:
    """What its cache holds, as it changes, and what its steps take."""

    def __init__(self, cache: CacheControl, max_step_tokens: int, digest_key: bytes = b"") -> None:
        cache.keep_journal(digest_key)
        self._cache = cache
        self._cost = MeasuredCost(max_step_tokens)
        self._next_cost = 2
        self._number = 0
        self._all_of_it = False

    def tell_all(self) -> None:
        """Say all that is held, next."""
        self._all_of_it = True

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self._cost.note(plan, seconds)

    def take(self) -> list[FromEngine]:
        """What is to be told now; often nothing."""
        said: list[FromEngine] = []
        change = self._cache.changes(self._all_of_it)
        below = self._cache.changes_below(change is not None and change.fresh)
        if change is not None or below:
            change = change or Change(_NONE, _NONE)
            self._all_of_it = False
            self._number += 1
            said.append(
                CacheChanged(self._number, change.added, change.removed, change.fresh, below)
            )
        if self._cost.steps >= self._next_cost:
            self._next_cost = self._cost.steps + min(self._cost.steps, _STEPS)
            said.append(CostMeasured(self._cost.cost()))
        return said
