"""The engine's loop: receive, plan, run, commit, send.

 without overlap   plan 1 | run 1 | commit 1 | plan 2 | run 2 | commit 2
 with overlap      plan 1 | run 1 ........... | run 2 ........... | run 3
                          | plan 2            | commit 1, plan 3  | commit 2

Sections: steps, resuming, garbage, pipes, loop.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from rootlace.runtime import processes
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import (
    STEPS,
    Abort,
    EngineOutput,
    EngineRequest,
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
    Heartbeat,
    Offered,
    Pause,
    Pinned,
    PinsLost,
    ReleaseProgram,
    Stats,
    Stop,
    TellCache,
    ThoughtTokens,
    ToEngine,
    Tree,
    Unpin,
    Unpinned,
    decode_to_engine,
    encode,
    kv_namespace,
)
from rootlace.runtime.contracts.plan import Executor, ExecutorLost, Launched, StepPlan
from rootlace.runtime.engine.process import FIRST, CompilingRequests, Telling
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.structured.thoughts import ThoughtMatcher
from rootlace.wire.errors import (
    InternalError,
    InvalidConstraint,
    InvalidRequest,
    Overloaded,
    RootlaceError,
)

if TYPE_CHECKING:
    from rootlace.runtime.engine.constraints import LateCompiler

# Steps --------------------------------------------------------------------------------------------


def step_record(path: Path, max_rows: int) -> np.ndarray:
    """Make the file that `read_step_record` reads, for steps of at most `max_rows` rows."""
    shape = (STEPS + 1, 1 + 2 * max_rows)
    # Written, not only sized: a full disk fails here, and no step later.
    np.zeros(shape, np.int64).tofile(path)
    # A plain view: indexing a memmap makes an object of its class each time.
    return np.memmap(path, np.int64, "r+", shape=shape).view(np.ndarray)


def write_down(row: np.ndarray, rids: Sequence[int] | np.ndarray, lengths: Any) -> None:
    """Write the requests of a step, with their context `lengths`, into a row of the record."""
    count, half = len(rids), len(row) // 2
    row[1 : 1 + count] = rids
    row[1 + half : 1 + half + count] = lengths
    row[0] = count  # last: the process may die at any moment


TRUSTED_STEPS = 8
"""Measured steps from which on a forecast says whether the loop hangs."""


class Steps:
    """Execution of steps: takes plans from the scheduler to the executor, and results back.

    With `overlap`, a step is launched while the step before it runs; then the result of the step
    before is waited for and committed. The executor never waits for the host as long as planning
    takes less than a step. Updates of a step are sent as soon as its result is there.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        overlap: bool,
        send: Callable[[list[EngineOutput]], None],
        record: np.ndarray | None = None,
        move: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Make an execution. `send` receives updates that should not wait until the step is over.

        `record` (of `step_record`) receives the steps in flight. `move` moves blocks between the
        pool and offload levels.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._overlap = overlap
        self._send = send
        self._record = record
        self._move = move
        self._running: Launched | None = None
        self.count = 0
        """Count of steps that were committed, failed or dropped."""
        self.busy = 0.0
        """Seconds in `step`."""
        self.waited = 0.0
        """Seconds of `busy` spent in the executor: launching, or waiting for results."""
        self.planned = False
        """Whether the last call had a step."""
        self._forecasts = [0.0] * STEPS
        """Seconds of the steps in flight, by step number modulo `STEPS`."""

    def step(self) -> list[EngineOutput]:
        """Plan, run and commit as far as possible; return the updates. Does nothing without work.

        An exception of a step ends the step's requests; only `ExecutorLost` is raised on.
        """
        started = time.perf_counter()
        over, scheduler = self.count, self._scheduler
        plan = scheduler.plan()
        self.planned = plan is not None
        if self._move is not None:
            try:
                self._move(scheduler.kv.tiering.moves.take())
            except Exception as error:  # the content of the pool is unknown now
                raise ExecutorLost(f"blocks could not be moved: {error!r}") from error
        if plan is not None:
            at = plan.step % STEPS
            self._forecasts[at] = plan.forecast
            if self._record is not None:
                write_down(self._record[at], plan.rids, plan.context_len)
        if self._overlap:
            updates = self._overlapped(plan)
        elif plan is None:
            updates = scheduler.take_updates()
        else:
            if scheduler.streams and (held_back := scheduler.held_back(plan)):
                self._send(held_back)
            before = time.perf_counter()
            try:
                result = self._executor.collect(self._executor.launch(plan))
            except Exception as error:
                updates = self._failed(plan, error)
            else:
                self.waited += time.perf_counter() - before
                self._over(plan)
                updates = scheduler.commit(plan, result)
        if self._running is not None or self.count > over:
            self.busy += time.perf_counter() - started
        return updates

    def finish(self) -> list[EngineOutput]:
        """Wait for the step in flight, if any."""
        running, self._running = self._running, None
        return [] if running is None else self._land(running)[0]

    @property
    def forecast(self) -> float:
        """Return the expected seconds of the steps in flight; -1 if too few were measured."""
        return -1.0 if self._scheduler.cost.steps < TRUSTED_STEPS else sum(self._forecasts)

    # ------------------------------------------------------------ with overlap

    def _overlapped(self, plan: StepPlan | None) -> list[EngineOutput]:
        updates = self._scheduler.take_updates()
        running, self._running = self._running, None
        launched, fault = self._launch(plan)
        if running is not None:
            landed, healthy = self._land(running)
            updates += landed
            if not healthy:  # the scheduler dropped the step planned behind
                if launched is not None:
                    if launched.plan.late:
                        self._sample(launched)
                    self._collect_and_drop(launched)
                if plan is not None:
                    self._over(plan)
                return updates
        if plan is None:
            return updates
        if launched is not None and plan.late:
            fault = self._sample(launched)
            if fault is not None:
                self._collect_and_drop(launched)
        if fault is not None:
            return updates + self._failed(plan, fault)
        self._running = launched
        return updates

    # ------------------------------------------------------------ parts of a step

    def _over(self, plan: StepPlan) -> None:
        """Record that a step is no longer in flight."""
        self.count += 1
        self._forecasts[plan.step % STEPS] = 0.0
        if self._record is not None:
            self._record[plan.step % STEPS, 0] = 0

    def _launch(self, plan: StepPlan | None) -> tuple[Launched | None, Exception | None]:
        if plan is None:
            return None, None
        before = time.perf_counter()
        try:
            return self._executor.launch(plan), None
        except Exception as error:
            return None, error
        finally:
            self.waited += time.perf_counter() - before

    def _sample(self, launched: Launched) -> Exception | None:
        try:
            self._executor.sample(launched, self._scheduler.late_samples(launched.plan))
        except Exception as error:
            return error
        return None

    def _land(self, running: Launched) -> tuple[list[EngineOutput], bool]:
        """Return the updates of a step, and whether the step ran to its end."""
        scheduler = self._scheduler
        if scheduler.streams and (updates := scheduler.held_back(running.plan)):
            self._send(updates)
        before = time.perf_counter()
        try:
            result = self._executor.collect(running)
        except Exception as error:
            return self._failed(running.plan, error), False
        finally:
            self.waited += time.perf_counter() - before
        self._over(running.plan)
        return self._scheduler.commit(running.plan, result), True

    def _collect_and_drop(self, launched: Launched) -> None:
        """Have the executor end a step with a result that is dropped."""
        try:
            self._executor.collect(launched)
        except ExecutorLost:
            raise
        except Exception:
            log.exception("step %d, which was given up, failed", launched.plan.step)

    def _failed(self, plan: StepPlan, error: Exception) -> list[EngineOutput]:
        if isinstance(error, ExecutorLost):
            raise error
        log.error("step %d of %d rows failed", plan.step, plan.num_rows, exc_info=error)
        self._over(plan)
        reason = error if isinstance(error, RootlaceError) else InternalError(repr(error))
        return self._scheduler.fail(plan, reason)


# Resuming -----------------------------------------------------------------------------------------


TOKENS_AT_ONCE = 1000
"""Tokens taken in per turn of the loop: a checked text takes 10 µs a token."""


class Resuming:
    """Constrained request of another engine; its matcher accepts the earlier output."""

    def __init__(self, request: EngineRequest, make: Callable[[], Matcher], waited: float) -> None:
        self.request = request
        self.waited = waited
        """Seconds of waiting for the constraint."""
        self._make = make
        self._matcher: Matcher | None = None
        self._taken = 0
        self._error: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._error is not None or self._taken == len(self.request.output_ids)

    def matcher(self) -> Matcher:
        """Return the matcher, when ready. Raises the error of its construction or of a token."""
        error, self._error = self._error, None  # the traceback's frames refer to this object
        if error is not None:
            raise error
        assert self._matcher is not None
        return self._matcher

    def advance(self, tokens: int) -> int:
        """Take in `tokens` tokens, or all that are left; return the count."""
        begun = self._taken
        try:
            if self._matcher is None:
                self._matcher = self._make()
            for token in self.request.output_ids[begun : begun + tokens].tolist():
                if not self._matcher.advance(token):
                    raise InvalidConstraint("the tokens to resume from violate the constraint")
                self._taken += 1
        except Exception as error:
            self._error = error
        return self._taken - begun


# Garbage ------------------------------------------------------------------------------------------


IDLE_AFTER = 10
"""Collections of the second generation before a full collection at an idle moment.

Each has some 7,000 objects. Python's own number for any moment.
"""
YOUNG = 700
"""New objects at which the youngest generation is collected; an older one after ten collections.
Python 3.13 has 2,000 by default, which would make the bounds here three times as large."""
BUSY_AFTER = 300
"""Collections before a full collection without an idle moment.

A full collection stops the process for some 0.3 µs an object. At most 2 million objects came since
the last one, few of them garbage: requests and constraints leave no cycles
(`tests/engine/test_garbage.py`).
"""


def collect_when_idle() -> None:
    """Collect garbage at idle moments from now on; call `collect` when there is nothing else to do.

    Current objects stay and are not scanned again (0.1 s with a large vocabulary). Memory that only
    the start needed goes back to the system.
    """
    gc.collect()
    gc.freeze()
    processes.give_back_memory()
    gc.set_threshold(YOUNG, 10, BUSY_AFTER)
    gc.enable()


def collect() -> bool:
    """Run a full collection if due, and give free memory back; return whether one ran."""
    if gc.get_count()[2] < IDLE_AFTER:
        return False
    gc.collect()
    processes.give_back_memory()
    return True


# Pipes --------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class Pipes:
    """The engine's ends of the pipes between server and engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inbox: str, outbox: str) -> None:
        self._inbox = connect(context, zmq.PULL, inbox)
        self._outbox = connect(context, zmq.PUSH, outbox)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """Return the received messages; wait at most `timeout_ms` for the first."""
        received: list[ToEngine] = []
        while self._inbox.poll(0 if received else timeout_ms):
            try:
                received.extend(decode_to_engine(self._inbox.recv()))
            except msgspec.DecodeError:
                log.exception("a message from the gateway could not be read")
        return received

    def send(self, messages: list[FromEngine]) -> None:
        self._outbox.send(encode(messages))


def connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


# Loop ---------------------------------------------------------------------------------------------


IDLE_SECONDS = 1.0
"""Seconds an idle loop sleeps before its next turn."""
COMPILING_SECONDS = 0.005
"""Seconds a message may lie unread while the loop waits for a compilation."""
FETCHING_SECONDS = 0.001
"""Sleep of the loop while blocks are being read, in seconds."""


class EngineLoop:
    """Loop of the engine, which owns the scheduler and the executor; single-threaded.

    `receive(timeout_ms)` returns messages that have come, waiting at most that long for the first;
    `send` sends messages. `compiler` compiles constraints on its own threads while other requests
    go on. With `jump_forward`, forced tokens are appended without sampling, if the constraint
    allows it. `overlap`, `record`, `move`: see `Steps`. Without work, `prepare` is called until it
    returns False; each call should be short. `executor_stats` adds to `stats`. `telling` reports to
    a router of several engines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        compiler: LateCompiler,
        receive: Callable[[int], list[ToEngine]],
        send: Callable[[list[FromEngine]], None],
        jump_forward: bool = True,
        overlap: bool = False,
        *,
        record: np.ndarray | None = None,
        prepare: Callable[[], bool] = lambda: False,
        executor_stats: Callable[[], dict[str, int | float]] = dict,
        telling: Telling | None = None,
        move: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._record = record
        self._telling = telling
        self._steps = Steps(scheduler, executor, overlap, self._send_now, record, move)
        self._compiler = compiler
        self._compiling = CompilingRequests(compiler)
        self._resuming: dict[int, Resuming] = {}
        """Requests whose matchers accept earlier outputs, a part in each turn."""
        self._jump_forward = jump_forward
        self._prepare = prepare
        self._executor_stats = executor_stats
        self._receive = receive
        self._send = send
        self._outgoing: list[FromEngine] = []
        self._stopping = False
        self._paused = False
        self.turns = 0
        """Count of turns: a constant count means a hung loop, or a long step."""

    def run(self) -> None:
        """Run until a `Stop` comes."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Receive, plan, run, commit and send once; False after a `Stop`."""
        self.turns += 1
        # With work to do, only look; without, sleep until a message comes.
        tiering = self._scheduler.kv.tiering
        compiling, resuming = self._compiling, self._resuming
        scheduler = self._scheduler
        busy = scheduler.by_rid or scheduler.has_work
        idle = self._paused or not (busy or (tiering.active and tiering.handing.busy))
        if idle and compiling.by_rid:
            compiling.wait(COMPILING_SECONDS)
            idle = False
        idle = idle and not resuming
        wait = idle and (self._paused or not (self._prepare() or collect()))
        fetching = tiering.active and not self._steps.planned and tiering.waiting
        nap = FETCHING_SECONDS if fetching else 0.0
        for message in self._receive(int(1000 * (IDLE_SECONDS if wait else nap))):
            self._handle(message)
        if compiling.by_rid:
            for arrived in compiling.take():
                self._begin(*arrived)
        if resuming:
            self._resume()
        if tiering.active and tiering.handing.busy:
            # Another engine waits for the blocks, and a step may take long.
            tiering.poll()
            self._outgoing += [HandedOver(*answer) for answer in tiering.handing.take_answers()]
            self._flush()
        if not self._paused:
            updates = self._steps.step()  # which may replace the list of outgoing messages
            self._outgoing += updates
        pins = self._scheduler.kv.retention.pins
        if pins.lost:
            self._outgoing.append(PinsLost(pins.take_lost()))
        if self._outgoing or self._telling is not None:
            self._flush()
        if self._stopping:
            updates = self._steps.finish()
            self._outgoing += updates
            self._flush()
        return not self._stopping

    def _resume(self) -> None:
        """Let matchers take in earlier outputs; add the requests whose matchers are ready.

        At most `TOKENS_AT_ONCE` tokens, so that other requests do not wait for a whole output.
        """
        left = TOKENS_AT_ONCE
        for rid, one in list(self._resuming.items()):
            if left <= 0:
                return
            left -= max(1, one.advance(left))
            if one.ready:
                del self._resuming[rid]
                self._add(one.request, one.matcher, one.waited)

    def heartbeat(self) -> Heartbeat:
        """Return the loop's progress; called by another thread."""
        return Heartbeat(self.turns, self._steps.forecast)

    # ------------------------------------------------------------ sending

    def _send_now(self, updates: list[EngineOutput]) -> None:
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
        if isinstance(message, EngineRequest):
            if self._record is None:
                self._submit(message)
            else:
                length = len(message.token_ids) + len(message.output_ids)
                write_down(self._record[STEPS], (message.rid,), length)
                self._submit(message)
                self._record[STEPS, 0] = 0
        elif isinstance(message, Abort):
            for rid in message.rids:
                if self._compiling.remove(rid) or self._resuming.pop(rid, None) is not None:
                    update: EngineOutput | None = EngineOutput(rid, finish="abort")
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
            unpinned = self._scheduler.cache.unpin(message.pin, message.namespace)
            self._outgoing.append(Unpinned(message.ticket, unpinned))
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
        """Give blocks to another engine, or take offered ones."""
        handing = self._scheduler.kv.tiering.handing
        namespace, tokens = kv_namespace(message.namespace, message.adapter), message.token_ids
        if isinstance(message, HandOver):
            handing.give(message.ticket, namespace, tokens, message.first, message.slots)
        else:
            handing.offer(
                *(message.rid, namespace, tokens, message.first, message.places, message.source)
            )

    def _submit(self, request: EngineRequest) -> None:
        constraint = request.constraint
        if request.rid in self._compiling.by_rid or request.rid in self._resuming:
            self._refuse(request.rid, InvalidRequest(f"request id {request.rid} is in use"))
            return
        if constraint is None and request.thoughts is None:
            self._add(request, None)
            return
        # A watcher of thoughts needs the vocabulary, as a compiled constraint does.
        constraint = constraint or FIRST
        grammar = self._compiler.cached(constraint)
        if grammar is not None:
            self._begin(request, grammar.matcher)
            return
        limit = self._scheduler.config.max_waiting
        if len(self._compiling.by_rid) >= limit and not request.resumed:
            refusal = Overloaded(f"at most {limit} requests may wait for their constraints")
            self._refuse(request.rid, refusal)
        else:
            self._compiling.add(request, constraint)

    def _begin(
        self, request: EngineRequest, make: Callable[[], Matcher], waited: float = 0.0
    ) -> None:
        """Schedule the request once its matcher has taken in the earlier output."""
        if request.thoughts is not None:
            make = partial(self._behind_thoughts, request, request.thoughts, make)
        if len(request.output_ids):
            self._resuming[request.rid] = Resuming(request, make, waited)
        else:
            self._add(request, make, waited)

    def _behind_thoughts(
        self, request: EngineRequest, thoughts: ThoughtTokens, make: Callable[[], Matcher]
    ) -> Matcher:
        inner = None if request.constraint is None else _matcher(make, request)
        return ThoughtMatcher(inner, thoughts, self._compiler.vocabulary)

    def _add(
        self, request: EngineRequest, make: Callable[[], Matcher] | None, waited: float = 0.0
    ) -> None:
        """Give the request to the scheduler; an exception of `make` ends only this request."""
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
        self._outgoing.append(EngineOutput(rid, finish="error", code=error.code, error=str(error)))
        error.__traceback__ = None  # its frames refer to the future that holds the error

    def stats(self) -> dict[str, int | float]:
        """Return the scheduler's and executor's counters, and the loop's seconds by kind."""
        counters = self._scheduler.stats()
        return {
            **counters,
            "waiting": counters["waiting"] + len(self._compiling.by_rid) + len(self._resuming),
            "compiling": len(self._compiling.by_rid),
            "compiled": self._compiling.compiled,
            "compile_seconds": self._compiling.seconds,
            "engine_busy_seconds": self._steps.busy,
            "engine_model_seconds": self._steps.waited,
            **self._executor_stats(),
        }


def _matcher(make: Callable[[], Matcher], request: EngineRequest) -> Matcher | None:
    """Return the request's matcher; None if the constraint need not be enforced, and cannot."""
    try:
        return make()
    except Exception as error:
        if request.constraint is None or not request.constraint.optional:
            raise
        log.info("request %d goes on without a constraint: %s", request.rid, error)
        error.__traceback__ = None  # its frames refer to the future that holds the error
        return None
