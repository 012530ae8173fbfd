"""The engine's loop: receive, plan, run, commit, send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np

from rootlace.runtime.constrained.matchers.thoughts import ThoughtGrammar
from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.contracts.messages import (
    Abort,
    Explain,
    Explained,
    Flush,
    Flushed,
    ForgetNamespace,
    FromEngine,
    GetPins,
    GetStats,
    GetTree,
    HandedOver,
    HandOver,
    Offered,
    Pause,
    Pinned,
    PinsLost,
    ReleaseProgram,
    Stats,
    Stop,
    TellCache,
    ToEngine,
    Tree,
    Unpin,
    Unpinned,
)
from rootlace.runtime.contracts.plan import Executor
from rootlace.runtime.contracts.request import Request, ThoughtTokens, kv_namespace
from rootlace.runtime.contracts.step_record import StepRecord
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.compiling import FIRST, Compiler, CompilingRequests
from rootlace.runtime.engine.resuming import Resuming, ResumingRequests
from rootlace.runtime.engine.steps import Steps
from rootlace.runtime.engine.telling import Telling
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    RootlaceError,
)

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long an idle loop sleeps before it takes its next turn."""
COMPILING_SECONDS = 0.005
"""How long a message may lie unread while the loop only waits for a compilation."""
FETCHING_SECONDS = 0.001
"""How long the loop sleeps where it only waits for blocks that are being read."""


class EngineLoop:
    """Owns the scheduler and the executor; single-threaded.

    `receive(timeout_ms)` returns the messages that have come, waiting at most that long for a first
    one; `send` sends messages. `compiler` compiles constraints on threads of its own; other
    requests go on meanwhile. With `jump_forward`, forced tokens are appended without sampling,
    where the constraint allows it, too. `overlap`, `record`, `move`: see `Steps`. While there is no
    work, `prepare` is called until it returns False; each call should be short. `executor_stats`
    adds to `stats`. `telling`: what is told where the engine is one of several.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        compiler: Compiler,
        receive: Callable[[int], list[ToEngine]],
        send: Callable[[list[FromEngine]], None],
        jump_forward: bool = True,
        overlap: bool = False,
        *,
        record: StepRecord | None = None,
        prepare: Callable[[], bool] = lambda: False,
        executor_stats: Callable[[], dict[str, int | float]] = dict,
        telling: Telling | None = None,
        move: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._telling = telling
        note = None if telling is None else telling.note
        self._steps = Steps(scheduler, executor, overlap, self._send_now, record, note, move)
        self._compiler = compiler
        self._compiling = CompilingRequests(compiler)
        self._resuming = ResumingRequests()
        self._jump_forward = jump_forward
        self._prepare = prepare
        self._executor_stats = executor_stats
        self._receive = receive
        self._send = send
        self._outgoing: list[FromEngine] = []
        self._stopping = False
        self._paused = False
        self.turns = 0
        """How often the loop went round: it is hung, or in a long step, where this stands still."""

    def run(self) -> None:
        """Until a `Stop` comes."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Receive, plan, run, commit and send once; False if it was the last time."""
        self.turns += 1
        # With work to do, only look; without, sleep until something comes.
        tiering = self._scheduler.kv.tiering
        idle = self._paused or not (self._scheduler.has_work or tiering.handing.busy)
        if idle and len(self._compiling):
            self._compiling.wait(COMPILING_SECONDS)
            idle = False
        idle = idle and not len(self._resuming)
        wait = idle and (self._paused or not self._prepare())
        nap = FETCHING_SECONDS if self._only_fetching else 0.0
        for message in self._receive(int(1000 * (IDLE_SECONDS if wait else nap))):
            self._handle(message)
        for waiting in self._compiling.take():
            self._begin(waiting.request, waiting.grammar.result, waiting.waited)
        for one in self._resuming.take():
            self._add(one.request, one.matcher, one.waited)
        if tiering.handing.busy:  # another engine waits for it, and a step may take long
            tiering.poll()
            self._outgoing += [HandedOver(*answer) for answer in tiering.handing.take_answers()]
            self._flush()
        # Not in one statement: `_send_now` replaces the list while the step runs.
        updates = [] if self._paused else self._steps.step()
        self._outgoing += updates
        if lost := self._scheduler.kv.retention.pins.take_lost():
            self._outgoing.append(PinsLost(lost))
        self._flush()
        if self._stopping:
            updates = self._steps.finish()
            self._outgoing += updates
            self._flush()
        return not self._stopping

    @property
    def _only_fetching(self) -> bool:
        """Whether there is nothing to compute until blocks were read."""
        return not self._steps.planned and self._scheduler.kv.tiering.waiting

    # ------------------------------------------------------------ sending

    def _send_now(self, updates: list[Update]) -> None:
        """Send updates at once, in the middle of a step."""
        self._outgoing += updates
        self._flush()

    def _flush(self) -> None:
        if self._telling is not None:
            self._outgoing = self._telling.take() + self._outgoing
        if self._outgoing:
            self._send(self._outgoing)
            self._outgoing = []

    # ------------------------------------------------------------ messages

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            self._submit(message)
        elif isinstance(message, Abort):
            for rid in message.rids:
                if self._compiling.remove(rid) or self._resuming.remove(rid):
                    update: Update | None = Update(rid, finish="abort")
                else:
                    update = self._scheduler.abort(rid)
                if update is not None:
                    self._outgoing.append(update)
        elif isinstance(message, ReleaseProgram):
            self._scheduler.cache.release_program(message.program, message.wanted)
        elif isinstance(message, ForgetNamespace):
            self._scheduler.cache.forget_namespace(message.namespace)
        elif isinstance(message, GetPins):
            self._outgoing.append(Pinned(message.ticket, self._scheduler.view.pins()))
        elif isinstance(message, Unpin):
            found = self._scheduler.cache.unpin(message.pin, message.namespace)
            self._outgoing.append(Unpinned(message.ticket, found))
        elif isinstance(message, Flush):
            self._scheduler.cache.flush()
            self._outgoing.append(Flushed(message.ticket))
        elif isinstance(message, GetStats):
            self._outgoing.append(Stats(message.ticket, self.stats()))
        elif isinstance(message, Explain):
            namespace = kv_namespace(message.namespace, message.adapter)
            report = self._scheduler.view.explain(namespace, message.token_ids, message.scope)
            self._outgoing.append(Explained(message.ticket, report))
        elif isinstance(message, GetTree):
            page = self._scheduler.view.tree_page(message.namespace, message.under, message.limit)
            self._outgoing.append(Tree(message.ticket, page))
        elif isinstance(message, Pause):
            self._paused = message.paused
            self._outgoing += self._steps.finish() if message.paused else []
        elif isinstance(message, HandOver | Offered):
            self._hand(message)
        elif isinstance(message, TellCache):
            if self._telling is not None:
                self._telling.tell_all()
        else:
            assert isinstance(message, Stop)
            self._stopping = True

    def _hand(self, message: HandOver | Offered) -> None:
        """Blocks go to another engine, or come from one."""
        handing = self._scheduler.kv.tiering.handing
        namespace, tokens = kv_namespace(message.namespace, message.adapter), message.token_ids
        if isinstance(message, HandOver):
            handing.give(message.ticket, namespace, tokens, message.first, message.slots)
        else:
            handing.offer(
                *(message.rid, namespace, tokens, message.first, message.places, message.source)
            )

    def _submit(self, request: Request) -> None:
        constraint = request.constraint
        if request.rid in self._compiling or request.rid in self._resuming:
            self._refuse(request.rid, InvalidRequest(f"request id {request.rid} is in use"))
            return
        if constraint is None and request.thoughts is None:
            self._add(request, None)
            return
        # What watches thoughts knows the vocabulary, as what was compiled does.
        constraint = constraint or FIRST
        grammar = self._compiler.cached(constraint)
        if grammar is not None:
            self._begin(request, lambda: grammar)
        elif len(self._compiling) >= self._scheduler.config.max_waiting and not request.resumed:
            count = len(self._compiling)
            self._refuse(request.rid, Overloaded(f"{count} constraints are being compiled"))
        else:
            self._compiling.add(request, constraint)

    def _begin(self, request: Request, grammar: Callable[[], Grammar], waited: float = 0.0) -> None:
        """With its constraint, once its matcher has taken in what was generated before."""
        if request.thoughts is not None:
            grammar = partial(self._behind_thoughts, request, request.thoughts, grammar)
        if len(request.output_ids):
            self._resuming.add(Resuming(request, grammar, waited))
        else:
            self._add(request, lambda: grammar().matcher(), waited)

    def _behind_thoughts(
        self, request: Request, thoughts: ThoughtTokens, grammar: Callable[[], Grammar]
    ) -> Grammar:
        def inner() -> Matcher | None:
            if request.constraint is None:
                return None
            return _matcher(lambda: grammar().matcher(), request)

        return ThoughtGrammar(inner, thoughts, self._compiler.vocabulary)

    def _add(
        self, request: Request, make: Callable[[], Matcher] | None, waited: float = 0.0
    ) -> None:
        """Give the request to the scheduler; what making its matcher raises ends it alone."""
        constraint = request.constraint
        jumps = constraint is None or constraint.jump_forward != "off"
        try:
            matcher = None if make is None else _matcher(make, request)
            self._scheduler.add(
                request, matcher, jump_forward=jumps and self._jump_forward, waited=waited
            )
        except RootlaceError as error:
            self._refuse(request.rid, error)
        except Exception as error:
            log.exception("request %d could not be added", request.rid)
            self._refuse(request.rid, InternalError(repr(error)))

    def _refuse(self, rid: int, error: RootlaceError) -> None:
        self._outgoing.append(Update(rid, finish="error", code=error.code, error=str(error)))
        error.__traceback__ = None  # its frames know the future that knows it

    def stats(self) -> dict[str, int | float]:
        """The scheduler's counters, where the loop's seconds went, and the executor's counters."""
        counters = self._scheduler.stats()
        return {
            **counters,
            "waiting": counters["waiting"] + len(self._compiling) + len(self._resuming),
            "compiling": len(self._compiling),
            "compiled": self._compiling.compiled,
            "compile_seconds": self._compiling.seconds,
            "engine_busy_seconds": self._steps.busy,
            "engine_model_seconds": self._steps.waited,
            **self._executor_stats(),
        }


def _matcher(make: Callable[[], Matcher], request: Request) -> Matcher | None:
    """None where the request's constraint need not be enforced, and cannot."""
    try:
        return make()
    except Exception as error:
        if request.constraint is None or not request.constraint.optional:
            raise
        log.info("request %d goes on without a constraint: %s", request.rid, error)
        error.__traceback__ = None  # its frames know the future that knows it
        return None
