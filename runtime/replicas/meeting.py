"""Where hosts of engines find the gateway, which has places for engines of other machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from rootlace.runtime.contracts.messages import Died, FromEngine, Leaving, Ready, Stop, ToEngine
from rootlace.runtime.engine.client.child_engine import STOP_GRACE_SECONDS, DiedAtStart
from rootlace.runtime.replicas.line import Line, LineAddress


class Meeting:
    """The gateway's: hosts that come are given the places of its replicas.

    Belongs to the event loop that its places' engines are opened on.
    """

    def __init__(self, host: str) -> None:
        """`host`: the address of the interface that other machines reach."""
        self._host = host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Four for each engine; ZeroMQ's default is enough for 255 of them.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._vacant: dict[RemoteEngine, RemotePlace] = {}

    def place(
        self,
        number: int,
        wanted: Callable[[], bool],
        on_leaving: Callable[[], None],
        prefill: bool = False,
    ) -> RemotePlace:
        """For the replica of this number. `wanted`: whether requests wait for its next engine;
        `on_leaving` is called when the host of one asks for its end; `prefill`: it computes prompts
        for others."""
        return RemotePlace(self, number, wanted, on_leaving, prefill)

    def attach(self, prefill: bool = False) -> LineAddress | None:
        """An engine is there: where its host is to connect, at a place that requests wait for, else
        at the first one. None: there is no such place that has no engine."""
        vacant = [one for one, place in self._vacant.items() if place.prefill == prefill]
        if not vacant:
            return None
        engine = min(vacant, key=lambda one: self._vacant[one].urgency)
        address = engine.attach()  # where it has no port, the place stays
        del self._vacant[engine]
        return address

    def wait_at(self, place: RemotePlace, hear: Callable[[FromEngine], None]) -> RemoteEngine:
        """The next engine of a place."""
        engine = RemoteEngine(
            self._context,
            self._host,
            hear,
            place.on_leaving,
            lambda: self._vacant.pop(engine, None),
        )
        self._vacant[engine] = place
        return engine

    def close(self) -> None:
        """When all places are closed."""
        self._context.destroy(linger=1000)


class RemotePlace:
    """A `Place` whose engines are started elsewhere, and come when they are ready."""

    patient = True

    def __init__(
        self,
        meeting: Meeting,
        number: int,
        wanted: Callable[[], bool],
        on_leaving: Callable[[], None],
        prefill: bool,
    ) -> None:
        self._meeting = meeting
        self.prefill = prefill
        self._number = number
        self._wanted = wanted
        self.on_leaving = on_leaving

    @property
    def urgency(self) -> tuple[bool, int]:
        """The least one is the next to have an engine."""
        return not self._wanted(), self._number

    def open(self, hear: Callable[[FromEngine], None]) -> RemoteEngine:
        return self._meeting.wait_at(self, hear)

    def close(self) -> None:
        """Its engine is closed; the meeting is somebody else's."""


class RemoteEngine:
    """A `PlacedEngine` of another machine, from before there is one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        hear: Callable[[FromEngine], None],
        on_leaving: Callable[[], None],
        give_up: Callable[[], object],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._context = context
        self._host = host
        self._hear = hear
        self._on_leaving = on_leaving
        self._give_up = give_up
        self._line: Line | None = None
        self._attached: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._ended: asyncio.Future[Died | None] = loop.create_future()

    def attach(self) -> LineAddress:
        """Its host is there: where it is to connect."""
        self._line, address = Line.open(self._context, self._host, self._take, self.kill)
        self._attached.set_result(None)
        return address

    def send(self, message: ToEngine) -> None:
        if self._line is not None:
            self._line.pipes.send(message)

    async def ready(self) -> Ready:
        """Wait for one. Raises DiedAtStart where a host was there and did not connect, or went."""
        await self._attached
        either: set[asyncio.Future[Any]] = {self._ready, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise DiedAtStart(None)
        return self._ready.result()

    async def ended(self) -> int | None:
        died = await asyncio.shield(self._ended)
        return None if died is None else died.code

    def kill(self) -> None:
        """It counts as lost: its host hears of that, or is gone, too."""
        if not self._ended.done():
            self._ended.set_result(None)

    def in_step(self) -> Mapping[int, int] | None:
        died = self._ended.result() if self._ended.done() else None
        return None if died is None else died.in_step

    async def end(self, patience: float = 0.0) -> None:
        self._give_up()
        if self._ready.done() and self._line is not None:
            self._line.pipes.send_now(Stop())
            await asyncio.wait({self._ended}, timeout=patience + STOP_GRACE_SECONDS)

    def close(self) -> None:
        self._give_up()
        if self._line is not None:
            self._line.close(linger=1000)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Leaving):
            self._on_leaving()
        elif isinstance(message, Died):
            if not self._ended.done():
                self._ended.set_result(message)
        else:
            self._hear(message)
