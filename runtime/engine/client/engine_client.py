"""The gateway's end of the engine: has it started, sends it requests, hands on its updates, and has
the next one started if it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    Abort,
    CacheChanged,
    CostMeasured,
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
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.client.child_engine import Children, DiedAtStart
from rootlace.runtime.engine.client.culprits import Culprits
from rootlace.runtime.engine.client.deaths import Deaths
from rootlace.runtime.engine.client.forgets import Forgets
from rootlace.runtime.engine.client.in_flight import InFlight, Submitted
from rootlace.runtime.engine.client.pinned_prompts import PinnedPrompts
from rootlace.runtime.engine.client.place import Place, PlacedEngine
from rootlace.runtime.engine.client.pulse import STALL_SECONDS, Pulse
from rootlace.runtime.engine.client.questions import EngineDied, Questions
from rootlace.runtime.engine.client.siblings import Siblings
from rootlace.wire.errors import RootlaceError, ServerUnavailable

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 4.0, 16.0, 64.0)
"""After how long one that could not be started in place of another one is tried again."""
RESTART_SECONDS = 8.0
"""So long, questions wait for the next engine."""
SPILL_SECONDS = 20.0
"""How long an engine has, when it is to end, to write what it has cached to the disk."""
VACANT_SECONDS = 30.0
"""So long, what belongs to a place waits for somebody else to start an engine there."""


class EngineClient:
    """One engine process. All methods belong to the event loop that `start` ran on.

    When the engine dies, it is started again and every request that was running is submitted again
    with the tokens it had: its client notices a pause. What was pinned is pinned again. One that
    hangs is killed, which is the same.
    What was in the step that it computed is computed alone at first, so that a request that kills
    engines is given up alone (`InFlight`), and a client that sends many of them is suspended
    (`Culprits`); where too many deaths have no such reason (`Deaths`), the engine stays down and
    `on_exit` is called with the reason. Where it has `siblings`, its requests go on there.
    """

    info: Ready

    def __init__(
        self,
        config: EngineConfig,
        on_exit: Callable[[str], None] | None = None,
        siblings: Siblings | None = None,
        place: Place | None = None,
    ) -> None:
        self._config = config
        self._on_exit = on_exit
        self._siblings = siblings
        self._place: Place = place or Children(config, siblings)
        self._engine: PlacedEngine | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._culprits = Culprits() if siblings is None else siblings.culprits
        self._in_flight = InFlight(self._culprits, config.scheduler.max_waiting)
        self._questions = Questions()
        self._pinned = PinnedPrompts()
        self._forgets = Forgets.of(config) if siblings is None else siblings.forgets
        own = itertools.count(1).__next__
        self.next_rid = own if siblings is None else siblings.next_rid
        self._pulse = Pulse()
        self._up = False
        self._in_step: Mapping[int, int] = {}
        """Who was in the steps in which the last engine died."""
        self._stopping = False
        self._deaths = Deaths()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_exit: Callable[[str], None] | None = None,
        siblings: Siblings | None = None,
        place: Place | None = None,
    ) -> EngineClient:
        """Start the engine process and wait until its model is loaded; at a `place` where somebody
        else starts it, do not wait for that.

        Raises the typed error the engine gave (a bad model folder, too little memory ...), or
        ServerUnavailable if it ended without one.
        """
        client = cls(config, on_exit, siblings, place)
        if client._place.patient:
            start = partial(client._launch_again, None)
            client._watcher = asyncio.create_task(client._come_back(start))
            return client
        try:
            await client._launch()
        except BaseException:
            await client.stop()
            raise
        return client

    @property
    def healthy(self) -> bool:
        """Whether the loop was heard of lately."""
        return self._up and self._pulse.steady

    def submit(
        self, request: Request, on_update: Callable[[Update], None], stays: bool = False
    ) -> None:
        """Start a request; `on_update` hears of it until an update with `finish` set. One that
        `stays` is of no use to a sibling. Raises ClientSuspended, or Overloaded where too many wait
        for the next engine."""
        if (refusal := self._culprits.refusal(request.client)) is not None:
            raise refusal
        sent = self._up and not self._in_flight.quarantined
        self._in_flight.add(request, on_update, sent, stays)
        if sent:  # else the next engine is given it when it is ready
            self.send(request)

    def adopt(self, submitted: Submitted, in_step: Mapping[int, int]) -> None:
        """Go on with a request of a sibling that died: see `Siblings.on_death`."""
        request = self._in_flight.adopt(submitted, in_step, self._up)
        if request is not None:
            self.send(request)

    def leave(self) -> tuple[list[Submitted], Mapping[int, int]]:
        """What only waits for somebody to start an engine here, and may go on elsewhere; who was in
        the steps in which the last one died."""
        free = [] if self._up or not self._place.patient else self._in_flight.leave_free()
        return free, self._in_step

    def abort(self, rids: Iterable[int]) -> None:
        """End requests; those still running get a last update with `finish="abort"`."""
        if running := self._in_flight.abort(rids, self._up):
            self.send(Abort(running))

    def release_program(self, program: str, wanted: bool = False) -> None:
        self.send(ReleaseProgram(program, wanted))

    def forget_namespace(self, namespace: str) -> None:
        message = ForgetNamespace(namespace)
        if self._config.cache.disk:
            self._forgets.note(message)
        self.send(message)

    def pause(self, paused: bool) -> None:
        """Have the engine compute nothing, or go on. One that is started again goes on."""
        self.send(Pause(paused))

    async def flush(self) -> None:
        """Forget what no running request uses. An engine that is down does so when it is back,
        though ServerUnavailable is raised."""
        if self._config.cache.disk:
            self._forgets.note(Flush(0))
        await self.ask(Flush)

    async def stats(self) -> dict[str, Any]:
        pins = {"pins_restored": self._pinned.restored, "pins_lost": self._pinned.lost}
        return {**await self.ask(GetStats), **pins}

    async def ask(
        self,
        kind: Callable[..., ToEngine],
        *fields: Any,
        patient: bool = False,
    ) -> Any:
        """What answers `kind(ticket, *fields)`, one of `contracts.messages`, within
        `STALL_SECONDS` or, if `patient`, as long as the engine lives. A pin that is known here is
        let go without waiting for an engine, which may be down."""
        if kind is Unpin and self._pinned.let_go(self.abort, *fields):
            if self._up:
                self.send(kind(0, *fields))
            return True
        alone, again = self._siblings is None, False  # siblings answer where there are any
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
        if kind is Unpin and answer:  # it was told of after the question
            self._pinned.let_go(self.abort, fields[0], None)
        return answer

    def send(self, message: ToEngine) -> None:
        """Send what needs no answer."""
        if self._engine is not None:
            self._engine.send(message)

    async def stop(self) -> None:
        """Stop the engine; whatever still runs gets `finish="abort"`."""
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
        self._in_flight.fail(error)

    # ------------------------------------------------------------ one engine after another

    async def _launch(self) -> None:
        engine = self._engine = self._place.open(self._handle)
        pulse = self._pulse = Pulse()
        self.info = await (engine.ready() if self._place.patient else _ready_in_time(engine, pulse))
        self._pulse = Pulse()
        for message in self._forgets.to_started(returned=self._deaths.count > 0):
            self.send(message)
        self._up = True
        self._questions.resume()
        self._watcher = asyncio.create_task(self._watch(engine))

    async def _watch(self, engine: PlacedEngine) -> None:
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
        self._in_flight.died(self._deaths.note())
        self._forgets.died()
        log.error("the engine process ended with code %s", code)
        self._questions.fail(EngineDied("the engine restarted"))
        known, siblings = engine.in_step(), self._siblings
        in_step = self._in_step = known or {}
        if known is None and siblings is not None:
            siblings.on_death(self._in_flight.leave_lost(), in_step)
        else:  # who is found to have killed it explains it, and goes nowhere
            self._in_flight.judge(in_step)
            if siblings is not None:
                siblings.on_death(self._in_flight.leave(in_step), in_step)
        await self._come_back(partial(self._launch_again, code))

    async def _come_back(self, launch: Callable[[], Awaitable[None]]) -> None:
        siblings, in_step = self._siblings, self._in_step
        vacant = None
        if siblings is not None and self._place.patient:
            vacant = asyncio.get_running_loop().call_later(
                VACANT_SECONDS,
                lambda: siblings.on_death(self._in_flight.leave_lost(), in_step),
            )
        try:
            await launch()
        except Exception as error:
            log.error("the engine cannot be started again: %s", error)
            self._questions.fail(ServerUnavailable("the engine is not running"), for_good=True)
            if siblings is not None:
                siblings.on_gone(str(error))
                siblings.on_death(self._in_flight.leave_all(), in_step)
            # Why may name what is of this machine: it is in the log.
            self._in_flight.fail(ServerUnavailable("the engine cannot be started again"))
            if self._on_exit is not None:
                self._on_exit(str(error))
            return
        finally:
            if vacant is not None:
                vacant.cancel()
        for request in self._in_flight.resume(in_step):
            self.send(request)
        self._pinned.pin_again(self.next_rid, self.submit)
        if siblings is not None:
            siblings.on_return()

    async def _launch_again(self, code: int | None) -> None:
        """Start an engine for the one that ended, if there was one; another one where it dies as
        it starts, or after a while where it cannot be started."""
        tries = 0
        while True:
            if self._engine is not None:
                self._engine.close()
            if not self._place.patient:
                self._deaths.check(code)
            try:
                return await self._launch()
            except DiedAtStart as error:
                log.error("%s", error)
                self._deaths.note()
                code = error.code_of_process
            except (OSError, RootlaceError) as error:
                if self._place.patient or tries == len(RETRY_SECONDS):
                    raise
                # It may be for a moment only that there is no memory, descriptor or model.
                wait = RETRY_SECONDS[tries]
                log.error("the engine cannot be started; tried again in %g s: %s", wait, error)
                await asyncio.sleep(wait)
                tries += 1

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Update):
            # There are thousands a second, and heartbeats tell the pulse as much.
            if message.pin and (request := self._in_flight.request(message.rid)) is not None:
                self._pinned.note(message.pin, request)
            for next_one in self._in_flight.hear(message):
                self.send(next_one)
            return
        self._pulse.hear(message)
        if isinstance(message, Stats):
            self._questions.answer(message.ticket, message.values)
        elif isinstance(message, Explained):
            self._questions.answer(message.ticket, message.report)
        elif isinstance(message, Tree):
            self._questions.answer(message.ticket, message.page)
        elif isinstance(message, Pinned):
            self._questions.answer(message.ticket, message.pins)
        elif isinstance(message, Unpinned):
            self._questions.answer(message.ticket, message.found)
        elif isinstance(message, PinsLost):
            log.warning("the engine has lost %d pins: they are set again", message.count)
            self._pinned.pin_again(self.next_rid, self.submit)
        elif isinstance(message, HandedOver):
            self._questions.answer(message.ticket, message.checksums)
        elif isinstance(message, Flushed):
            self._questions.answer(message.ticket, None)
        elif isinstance(message, CacheChanged | CostMeasured):
            if self._siblings is not None:
                self._siblings.on_told(message)
        else:
            assert isinstance(message, Heartbeat)
            self._forgets.drop_old()


async def _ready_in_time(engine: PlacedEngine, pulse: Pulse) -> Ready:
    """Once it can be used; one that hangs while it loads is killed."""
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
