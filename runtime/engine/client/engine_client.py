"""The gateway's client of an engine: start, submit, update, restart.

 submit --> RestartPolicy --> engine --> EngineOutput --> on_update
               |  engine dies: start the next engine, resume the requests that it did not kill
               +--> another replica, where there is one

Sections: questions, pulse, launcher, engine client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.contracts.messages import (
    Abort,
    CacheChanged,
    CostMeasured,
    EngineOutput,
    EngineRequest,
    Explained,
    Flush,
    Flushed,
    ForgetNamespace,
    FromEngine,
    GetStats,
    HandedOver,
    Heartbeat,
    Pause,
    Pinned,
    PinsLost,
    Ready,
    ReleaseProgram,
    Stats,
    ToEngine,
    Tree,
    Unpin,
    Unpinned,
)
from rootlace.runtime.engine.client.cache_orders import Forgets, PinnedPrompts
from rootlace.runtime.engine.client.child_engine import Children, DiedAtStart
from rootlace.runtime.engine.client.restarts import PendingRequest, RestartPolicy, Suspensions
from rootlace.wire.errors import RootlaceError, ServerUnavailable

# Questions ----------------------------------------------------------------------------------------


class EngineDied(ServerUnavailable):
    """Error of a question whose engine died; the next engine may answer."""


class Questions:
    """Tickets of questions, and futures of their answers."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._settled = asyncio.Event()
        """Event that is set while an engine is up, or after the last engine."""
        self._gone: ServerUnavailable | None = None

    def resume(self) -> None:
        """Let questions be asked again after an engine has started."""
        self._gone = None
        self._settled.set()

    async def until_up(self, patience: float) -> None:
        """Wait for the next engine. Raises ServerUnavailable after `patience` seconds."""
        try:
            await asyncio.wait_for(self._settled.wait(), patience)
        except TimeoutError:
            raise ServerUnavailable("the engine is not running") from None
        if self._gone is not None:
            raise self._gone

    def open(self) -> int:
        """Return a new ticket."""
        self._last += 1
        self._open[self._last] = asyncio.get_running_loop().create_future()
        return self._last

    async def answer_to(self, ticket: int, patience: float | None) -> Any:
        """Return the answer to a ticket. Raises ServerUnavailable after `patience` seconds, or if
        no answer can come."""
        try:
            return await asyncio.wait_for(self._open[ticket], patience)
        except TimeoutError:
            raise ServerUnavailable(f"the engine has not answered for {patience:g} s") from None
        finally:
            self._open.pop(ticket, None)

    def answer(self, ticket: int, value: Any) -> None:
        future = self._open.get(ticket)
        if future is not None and not future.done():
            future.set_result(value)

    def fail(self, error: ServerUnavailable, for_good: bool = False) -> None:
        """Fail all open questions; `for_good`: no other engine will start."""
        self._settled.clear()
        if for_good:
            self._gone = error
            self._settled.set()
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)


# Pulse --------------------------------------------------------------------------------------------


STALL_SECONDS = 30.0
"""Seconds without a turn of the loop after which the engine is unhealthy and questions fail."""
SILENCE_SECONDS = 20.0
"""Seconds without a message, even a heartbeat, after which the process hangs."""
STUCK_SECONDS = 600.0
"""Seconds without a turn of the loop after which the engine hangs despite heartbeats, without a
forecast of its steps. The bound is lower after a start of less than a `LATE_LOADS`th of it."""
LATE_LOADS = 20.0
"""Bound of a step's time before any forecast, in multiples of the engine's start time; at least
`LATE_SECONDS` or `LATE_ALONE_SECONDS`.

A start reads all weights and runs steps of its own; a slow machine is slow at both.
"""
LATE_LOADS_OF_RANKS = 4.0
"""`LATE_LOADS` where a step waits for other ranks."""
LATE_STEPS = 20.0
"""Bound of a step's time in multiples of its forecast; an engine beyond the bound hangs. At least
`LATE_SECONDS` or `LATE_ALONE_SECONDS`.

A forecast comes from steps on this machine, so a slow machine has longer forecasts.
"""
LATE_SECONDS = 20.0
"""Least bound in seconds with other ranks, one of which may hang."""
LATE_ALONE_SECONDS = 120.0
"""Least bound in seconds without other ranks: a step may wait for weights read from a slow disk."""
LOADING_SECONDS = 100.0
"""Seconds of silence during loading after which the process hangs: loading sends heartbeats."""
NAP_SECONDS = 1.0


class Pulse:
    """Liveness of one engine process, from `Ready` on."""

    def __init__(self, ranks: bool = False, start_seconds: float = math.inf) -> None:
        """Begin the pulse. `ranks`: whether a step waits for other ranks. `start_seconds`: the
        duration of the engine's start."""
        self._late_seconds = LATE_SECONDS if ranks else LATE_ALONE_SECONDS
        unknown = (LATE_LOADS_OF_RANKS if ranks else LATE_LOADS) * start_seconds
        self._unknown_seconds = min(max(unknown, self._late_seconds), STUCK_SECONDS)
        self._moved = time.monotonic()
        self._turns = 0
        self._received = False
        self._moving = False
        self._step_seconds = -1.0

    @property
    def steady(self) -> bool:
        """Return whether the loop turned lately."""
        return time.monotonic() - self._moved < STALL_SECONDS

    def note(self, message: FromEngine) -> None:
        """Take note of any message of the process."""
        self._received = True
        if isinstance(message, Heartbeat):
            self._step_seconds = message.step_seconds
            if message.turns == self._turns:
                return  # the process lives, but its loop has not moved
            self._turns = message.turns
        self._moving = True
        self._moved = time.monotonic()

    async def lost(self, loading: bool = False) -> str:
        """Return the reason once the process hangs; a loading process turns no loop. Time is
        counted in naps, so that a pause of this process does not count as one of the engine."""
        silence = LOADING_SECONDS if loading else SILENCE_SECONDS
        silent = stuck = 0.0
        while True:
            self._received = self._moving = False
            await asyncio.sleep(NAP_SECONDS)
            silent = 0.0 if self._received else silent + NAP_SECONDS
            stuck = 0.0 if self._moving else stuck + NAP_SECONDS
            if silent >= silence:
                return f"nothing was heard of it for {silent:g} seconds"
            late = max(LATE_STEPS * self._step_seconds, self._late_seconds)
            if self._step_seconds < 0:
                late = self._unknown_seconds
            if stuck >= late and not loading:
                return f"its loop has stood at turn {self._turns} for {stuck:g} seconds"


# Launcher -----------------------------------------------------------------------------------------


class EngineHandle(Protocol):
    """Interface of one engine, from before its start until its end."""

    def send(self, message: ToEngine) -> None: ...

    async def ready(self) -> Ready:
        """Wait until the engine is usable."""
        ...

    async def ended(self) -> int | None:
        """Return the exit status, once the engine has ended; None if unknown."""
        ...

    def kill(self) -> None: ...

    def in_step(self) -> Mapping[int, int] | None:
        """Return the requests in the steps in which the engine died, with planned context lengths.
        None if unknown, or if the engine ended on request."""
        ...

    async def end(self, patience: float = 0.0) -> None:
        """End the engine, with `patience` seconds for its writes."""
        ...

    def close(self) -> None: ...


class EngineLauncher(Protocol):
    """Launcher of engines, one after another."""

    @property
    def patient(self) -> bool:
        """Return whether engines are started elsewhere, at any time."""
        ...

    def open(self, hear: Callable[[FromEngine], None]) -> EngineHandle:
        """Return the next engine; `hear` receives its messages, before `Ready` too."""
        ...

    def close(self) -> None: ...


class ReplicaContext(msgspec.Struct, frozen=True):
    """Place of an engine, number `replica` of `replicas`; all report their caches by digests of one
    key.

    `on_report` receives the engine's reports on cache and steps. `on_death` receives requests that
    other replicas may continue. `on_return` is called when the engine is back. `on_gone` is called
    with the reason if the engine will not return, before the last requests leave. All replicas
    share `forgets` and `suspensions`; `next_rid` gives unused ids. `transfer`: block transfer
    between them, if any.
    """

    replica: int
    replicas: int
    digest_key: bytes
    on_report: Callable[[CacheChanged | CostMeasured], None]
    on_death: Callable[[list[PendingRequest]], None]
    on_return: Callable[[], None]
    on_gone: Callable[[str], None]
    forgets: Forgets
    suspensions: Suspensions
    next_rid: Callable[[], int]
    transfer: TransferConfig | None = None


# Engine client ------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 4.0, 16.0, 64.0)
"""Seconds before each retry of a failed restart."""
RESTART_SECONDS = 8.0
"""Seconds that questions wait for the next engine."""
SPILL_SECONDS = 20.0
"""Seconds that a stopping engine has for saving its cache to disk."""
ANSWERS: dict[type[FromEngine], str] = {
    Stats: "values",
    Explained: "report",
    Tree: "page",
    Pinned: "pins",
    Unpinned: "found",
    HandedOver: "checksums",
}
"""Field of a message that answers a question, by kind of message."""


class EngineClient:
    """Client of one engine process. All methods belong to the event loop of `start`.

    When the engine dies, a new one starts, and every unfinished request is submitted again with its
    tokens: clients notice a pause. Pins are restored. A hanging engine is killed, with the same
    result. `RestartPolicy` decides which requests end instead. After too many unexplained deaths
    the engine stays down and `on_exit` is called with the reason. With `siblings`, requests
    continue at other replicas.
    """

    info: Ready

    def __init__(
        self,
        config: EngineConfig,
        on_exit: Callable[[str], None] | None = None,
        siblings: ReplicaContext | None = None,
        place: EngineLauncher | None = None,
    ) -> None:
        self._config = config
        self._on_exit = on_exit
        self._siblings = siblings
        if siblings is None:
            self._place: EngineLauncher = place or Children(config)
            suspensions, self._forgets = Suspensions(), Forgets.of(config)
            self.next_rid = itertools.count(1).__next__
        else:
            self._place = place or Children(
                config, siblings.replica, siblings.replicas, siblings.digest_key, siblings.transfer
            )
            suspensions, self._forgets = siblings.suspensions, siblings.forgets
            self.next_rid = siblings.next_rid
        self._restarts = RestartPolicy(suspensions, config.scheduler.max_waiting)
        self._engine: EngineHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._questions = Questions()
        self._pinned = PinnedPrompts()
        self._pulse = self._begun_pulse()
        self._up = False
        self._stopping = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_exit: Callable[[str], None] | None = None,
        siblings: ReplicaContext | None = None,
        place: EngineLauncher | None = None,
    ) -> EngineClient:
        """Start the engine process and wait until its model is loaded.

        At a `place` where engines are started elsewhere, return without waiting.

        Raises the engine's typed error (a bad model folder, too little memory ...), or
        ServerUnavailable if the engine ended without one.
        """
        client = cls(config, on_exit, siblings, place)
        if client._place.patient:
            client._watcher = asyncio.create_task(client._come_back(None))
            return client
        try:
            await client._launch()
        except BaseException:
            await client.stop()
            raise
        return client

    @property
    def healthy(self) -> bool:
        """Return whether the loop turned lately."""
        return self._up and self._pulse.steady

    def submit(
        self, request: EngineRequest, on_update: Callable[[EngineOutput], None], stays: bool = False
    ) -> None:
        """Start a request; `on_update` is called until an update with `finish` set.

        A request that `stays` is useless to another replica. Raises ClientSuspended, or Overloaded
        if too many requests wait for the next engine.
        """
        self._restarts.add(request, on_update, self._up, stays)
        # Otherwise the next engine receives the request when ready.
        if self._up and self._engine is not None:
            self._engine.send(request)

    def adopt(self, pending: PendingRequest) -> None:
        """Continue a request of a replica that died: see `ReplicaContext.on_death`."""
        if (request := self._restarts.adopt(pending, self._up)) is not None:
            self.send(request)

    def leave(self) -> list[PendingRequest]:
        """Take out requests that wait for an engine and may continue at another replica."""
        return [] if self._up else self._restarts.leave()

    def abort(self, rids: Iterable[int]) -> None:
        """End requests; unfinished ones get a last update with `finish="abort"`."""
        if running := self._restarts.abort(rids, self._up):
            self.send(Abort(running))

    def release_program(self, program: str, wanted: bool = False) -> None:
        self.send(ReleaseProgram(program, wanted))

    def forget_namespace(self, namespace: str) -> None:
        message = ForgetNamespace(namespace)
        if self._config.cache.disk:
            self._forgets.note(message)
        self.send(message)

    def pause(self, paused: bool) -> None:
        """Pause or resume computation; a restarted engine is not paused."""
        self.send(Pause(paused))

    async def flush(self) -> None:
        """Forget every prefix that no running request uses.

        An engine that is down flushes on its return, though ServerUnavailable is raised.
        """
        if self._config.cache.disk:
            self._forgets.note(Flush(0))
        await self.ask(Flush)

    async def stats(self) -> dict[str, Any]:
        pins = {"pins_restored": self._pinned.restored, "pins_lost": self._pinned.lost}
        return {**await self.ask(GetStats), **pins}

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any, patient: bool = False) -> Any:
        """Return the answer to `kind(ticket, *fields)`, a message of `contracts.messages`.

        Waits at most `STALL_SECONDS` or, if `patient`, as long as the engine lives. A known pin is
        released without waiting for an engine, which may be down.
        """
        if kind is Unpin and self._pinned.release(self.abort, *fields):
            if self._up:
                self.send(kind(0, *fields))
            return True
        alone, again = self._siblings is None, False  # siblings answer if there are any
        while True:
            if not self._up:
                await self._questions.until_up(RESTART_SECONDS if alone else 0.0)
            ticket = self._questions.open()
            self.send(kind(ticket, *fields))
            try:
                answer = await self._questions.answer_to(ticket, None if patient else STALL_SECONDS)
                break
            except EngineDied:
                if again or patient or not alone:
                    raise
                again = True
        if kind is Unpin and answer:  # the pin was reported after the question
            self._pinned.release(self.abort, fields[0], None)
        return answer

    def send(self, message: ToEngine) -> None:
        """Send a message without an answer."""
        if self._engine is not None:
            self._engine.send(message)

    async def stop(self) -> None:
        """Stop the engine; unfinished requests get `finish="abort"`."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._engine is not None:
            await self._engine.end(SPILL_SECONDS if self._up and self._config.cache.disk else 0.0)
            self._engine.close()
        self._place.close()
        if self._siblings is None:
            self._forgets.close()
        error = ServerUnavailable("the runtime is stopping")
        self._questions.fail(error, for_good=True)
        self._restarts.fail(error)

    # ------------------------------------------------------------ one engine after another

    async def _launch(self) -> None:
        begun = time.monotonic()
        engine = self._engine = self._place.open(self._handle)
        pulse = self._pulse = self._begun_pulse()
        self.info = await (engine.ready() if self._place.patient else _ready_in_time(engine, pulse))
        self._pulse = self._begun_pulse(time.monotonic() - begun)
        for message in self._forgets.to_started(returned=self._restarts.deaths > 0):
            self.send(message)
        self._up = True
        self._questions.resume()
        self._watcher = asyncio.create_task(self._watch(engine))

    def _begun_pulse(self, start_seconds: float = math.inf) -> Pulse:
        return Pulse(self._config.executor.tensor_parallel > 1, start_seconds)

    async def _watch(self, engine: EngineHandle) -> None:
        ended = asyncio.ensure_future(engine.ended())
        lost = asyncio.ensure_future(self._pulse.lost())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                log.error("the engine process hangs (%s) and is killed", lost.result())
                engine.kill()
            code = await ended
        finally:
            lost.cancel()
        if self._stopping:
            return
        self._up = False
        self._forgets.died()
        log.error("the engine process ended with code %s", code)
        self._questions.fail(EngineDied("the engine restarted"))
        # Requests that killed the engine end here, and other replicas never see them.
        self._restarts.died(engine.in_step())
        if self._siblings is not None:
            self._siblings.on_death(self._restarts.leave())
        await self._come_back(code)

    async def _come_back(self, code: int | None) -> None:
        siblings = self._siblings
        try:
            await self._launch_again(code)
        except Exception as error:
            log.error("the engine cannot be started again: %s", error)
            self._questions.fail(ServerUnavailable("the engine is not running"), for_good=True)
            if siblings is not None:
                siblings.on_gone(str(error))
                siblings.on_death(self._restarts.leave())
            # The reason may name details of this machine, so only the log has it.
            self._restarts.fail(ServerUnavailable("the engine cannot be started again"))
            if self._on_exit is not None:
                self._on_exit(str(error))
            return
        for request in self._restarts.resume():
            self.send(request)
        self._pinned.pin_again(self.next_rid, self.submit)
        if siblings is not None:
            siblings.on_return()

    async def _launch_again(self, code: int | None) -> None:
        """Start an engine in place of an ended one. Repeat if the engine dies at its start, or
        after a while if no engine can be started."""
        tries = 0
        while True:
            if self._engine is not None:
                self._engine.close()
            if not self._place.patient:
                self._restarts.check_restart(code)
            try:
                return await self._launch()
            except DiedAtStart as error:
                log.error("%s", error)
                self._restarts.note_death()
                code = error.code_of_process
            except (OSError, RootlaceError) as error:
                if self._place.patient or tries == len(RETRY_SECONDS):
                    raise
                # Memory, descriptors or the model may be missing for a moment only.
                wait = RETRY_SECONDS[tries]
                log.error("the engine cannot be started; tried again in %g s: %s", wait, error)
                await asyncio.sleep(wait)
                tries += 1

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, EngineOutput):
            # Updates come by the thousands a second, and heartbeats suffice for the pulse.
            requests = self._restarts.requests
            if (pending := requests.get(message.rid)) is None:
                return
            pending.heard = True
            pending.output_ids.extend(message.token_ids)
            if message.facts is not None and message.facts.pin:
                self._pinned.note(message.facts.pin, pending.request)
            if message.finish is not None:
                del requests[message.rid]
            pending.on_update(message)
            return
        self._pulse.note(message)
        if isinstance(message, Stats | Explained | Tree | Pinned | Unpinned | HandedOver | Flushed):
            field = ANSWERS.get(type(message))
            self._questions.answer(message.ticket, field and getattr(message, field))
        elif isinstance(message, PinsLost):
            log.warning("the engine has lost %d pins: they are set again", message.count)
            self._pinned.pin_again(self.next_rid, self.submit)
        elif isinstance(message, CacheChanged | CostMeasured):
            if self._siblings is not None:
                self._siblings.on_report(message)
        else:
            assert isinstance(message, Heartbeat)
            self._forgets.drop_old()


async def _ready_in_time(engine: EngineHandle, pulse: Pulse) -> Ready:
    """Wait for `Ready`; an engine that hangs while loading is killed."""
    ready = asyncio.ensure_future(engine.ready())
    lost = asyncio.ensure_future(pulse.lost(loading=True))
    try:
        await asyncio.wait({ready, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            log.error("the engine process hangs (%s) as it starts and is killed", lost.result())
            engine.kill()
        return await ready
    finally:
        lost.cancel()
        ready.cancel()
