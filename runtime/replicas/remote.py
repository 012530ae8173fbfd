"""Hosts of engines on other machines, and the gateway's meeting point and places for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.contracts.messages import (
    Died,
    FromEngine,
    GetStats,
    Leaving,
    Ready,
    Stats,
    Stop,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from rootlace.runtime.engine.client.child_engine import (
    STOP_GRACE_SECONDS,
    ChildEngine,
    Children,
    DiedAtStart,
)
from rootlace.runtime.engine.client.engine_client import SPILL_SECONDS
from rootlace.wire import sockets
from rootlace.wire.sockets import MessageReader, Pipes, new_pair

# Line ---------------------------------------------------------------------------------------------
#
# The two pipes between a gateway and an engine on another machine: TCP, encrypted (CURVE).


_LOOK_SECONDS = 0.02
CONNECT_SECONDS = 20.0
"""Seconds for the other end to connect."""


class LineAddress(msgspec.Struct, frozen=True):
    """Secrets that the other end needs in order to connect; no third party may know the address."""

    to_engine: str
    from_engine: str
    public_key: bytes


class Line:
    """One end of a connection. `on_lost` is called if the other end does not come, or is gone."""

    def __init__(self, push: zmq.Socket[bytes], pipes: Pipes, on_lost: Callable[[], None]) -> None:
        self.pipes = pipes
        self._push = push
        self._on_lost = on_lost
        self.there = self._closed = False
        self._monitor: Any = push.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._reader = MessageReader(self._monitor, self._hear)
        asyncio.get_running_loop().call_later(CONNECT_SECONDS, self._look)

    @classmethod
    def open(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> tuple[Line, LineAddress]:
        """Return the gateway's end, at two free ports of the interface `host`."""
        public, secret = zmq.curve_keypair()
        push, pull = new_pair(context)
        there, back = (sockets.bind(socket, host, secret) for socket in (push, pull))
        pipes = Pipes(push, pull, on_message, encode, decode_from_engine)
        return cls(push, pipes, on_lost), LineAddress(there, back, public)

    @classmethod
    def connect(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: LineAddress,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> Line:
        """Return the engine's end."""
        push, pull = new_pair(context)
        # The monitor comes first: it misses a handshake that ended earlier.
        line = cls(push, Pipes(push, pull, on_message, encode, decode_to_engine), on_lost)
        for socket, target in ((push, address.from_engine), (pull, address.to_engine)):
            socket.setsockopt(zmq.IMMEDIATE, 1)
            sockets.connect(socket, target, address.public_key)
        return line

    def close(self, linger: int = 0) -> None:
        """Idempotent. What is under way has so many milliseconds to arrive."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._push.disable_monitor()
            self._monitor.close()
            self._push.linger = linger
            self.pipes.close()

    def _hear(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.there = True  # nobody else knows the key
        elif self.there:
            # The socket itself hears of it a little later than its monitor.
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Look for a connected reader: a stranger at the port connects and leaves, too, and does
        not count."""
        if not self._closed and not self._push.get(zmq.EVENTS) & zmq.POLLOUT:  # type: ignore[operator,arg-type]
            self.there = False
            self._on_lost()


# Host ---------------------------------------------------------------------------------------------
#
# An engine of this machine for a gateway of another one.


log = logging.getLogger(__name__)

Attach = Callable[[], Awaitable[LineAddress | None]]

RETRY_SECONDS = 1.0
_OWN_TICKET = -1
"""Ticket of the host's own questions; the gateway's tickets are positive."""


class Host:
    """Host of an engine process: finds the gateway with `attach`, and passes on both's messages.

    The host restarts an engine that died, and one whose gateway is lost, or sent the engine away:
    it may hold requests that no client waits for. Belongs to the event loop that `start` ran on.
    """

    def __init__(
        self,
        config: EngineConfig,
        digest_key: bytes,
        attach: Attach,
        transfer: TransferConfig | None = None,
    ) -> None:
        """`transfer`: how it hands blocks to engines of other machines, if it does."""
        self._spill_seconds = SPILL_SECONDS if config.cache.disk else 0.0
        self._children = Children(config, digest_key=digest_key, transfer=transfer)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._attach = attach
        self._engine: ChildEngine | None = None
        self._line: Line | None = None
        self._parted = asyncio.Event()
        """Set when the gateway is lost, or does not need the engine any more."""
        self._serving: asyncio.Task[None] | None = None
        self._stats: asyncio.Future[dict[str, Any]] | None = None
        self.leaving = False

    async def start(self) -> None:
        """Returns when the model is loaded. Raises what the engine gives as its reason."""
        ready = await self._start_engine()
        self._serving = asyncio.create_task(self._serve(ready))

    def check(self) -> None:
        """Raise the error that ended the connection, if any."""
        if self._serving is not None and self._serving.done() and not self.leaving:
            self._serving.result()

    async def stats(self) -> dict[str, Any]:
        """Return the engine's counters."""
        if self._stats is None or self._stats.done():
            self._stats = asyncio.get_running_loop().create_future()
        if self._engine is not None:
            self._engine.send(GetStats(_OWN_TICKET))
        return await asyncio.shield(self._stats)

    async def leave(self, seconds: float) -> None:
        """Ask the gateway for no new requests, wait `seconds` for running ones, then end the
        engine."""
        self.leaving = True
        serving = self._serving
        if self._line is not None and serving is not None:
            self._line.pipes.send(Leaving())
            ended, _ = await asyncio.wait({serving}, timeout=seconds)
            if not ended:
                log.warning("what runs has not ended in %g seconds: it goes on elsewhere", seconds)
                self._parted.set()
                await asyncio.wait({serving})
        elif serving is not None:
            serving.cancel()
            await asyncio.wait({serving})
        await self._end_engine()
        self._context.destroy(linger=1000)
        self._children.close()

    # ------------------------------------------------------------ engine and gateway

    async def _serve(self, ready: Ready) -> None:
        while True:
            address = None
            while address is None:
                address = await self._attach()
                if address is None:
                    await asyncio.sleep(RETRY_SECONDS)
            await self._carry(address, ready)
            await self._end_engine()
            if self.leaving:
                return
            ready = await self._start_engine()

    async def _carry(self, address: LineAddress, ready: Ready) -> None:
        """Pass messages between this engine and the gateway until one of the two is gone."""
        engine = self._engine
        assert engine is not None
        self._parted.clear()
        line = self._line = Line.connect(
            self._context, address, self._from_gateway, self._parted.set
        )
        line.pipes.send(ready)
        died = asyncio.ensure_future(engine.ended())
        parted = asyncio.ensure_future(self._parted.wait())
        try:
            await asyncio.wait({died, parted}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                log.error("the engine process ended with code %s", died.result())
                line.pipes.send(Died(died.result(), engine.in_step()))
                await asyncio.sleep(0)  # it leaves with the loop's next turn
        finally:
            for task in (died, parted):
                task.cancel()
            self._line = None
            line.close(linger=1000)

    async def _start_engine(self) -> Ready:
        engine = self._engine = self._children.open(self._from_engine)
        return await engine.ready()

    async def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.end(self._spill_seconds)
            engine.close()

    def _from_engine(self, message: FromEngine) -> None:
        if isinstance(message, Stats) and message.ticket == _OWN_TICKET:
            if self._stats is not None and not self._stats.done():
                self._stats.set_result(message.values)
        elif self._line is not None:
            self._line.pipes.send(message)

    def _from_gateway(self, message: ToEngine) -> None:
        if isinstance(message, Stop):
            self._parted.set()
        elif self._engine is not None:
            self._engine.send(message)


# Meeting ------------------------------------------------------------------------------------------


class Meeting:
    """The gateway's list of vacant replica places, which hosts take. Belongs to the event loop on
    which the engines of its places are opened."""

    def __init__(self, host: str) -> None:
        """`host`: the address of the interface that other machines reach."""
        self.host = host
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Four for each engine; ZeroMQ's default is enough for 255 of them.
        self.context.set(zmq.MAX_SOCKETS, self.context.get(zmq.SOCKET_LIMIT))
        self.vacant: set[RemoteEngine] = set()
        """Engines to come."""

    def attach(self, prefill: bool = False) -> LineAddress | None:
        """Return the address for a host whose engine is ready: at a place that requests wait for,
        else at the first. None if no such place is without an engine."""
        vacant = [one for one in self.vacant if one.place.prefill == prefill]
        if not vacant:
            return None
        engine = min(vacant, key=lambda one: (not one.place.wanted(), one.place.number))
        address = engine.attach()  # where it has no port, the place stays
        self.vacant.remove(engine)
        return address

    def close(self) -> None:
        """When all places are closed."""
        self.context.destroy(linger=1000)


class RemotePlace(msgspec.Struct, frozen=True, eq=False):
    """An `EngineLauncher` whose engines are started elsewhere, and connect when they are ready.

    `number` is the replica's. `wanted`: whether requests wait for the next engine. `on_leaving` is
    called when an engine's host asks for its end. `prefill`: it computes prompts for other engines.
    """

    meeting: Meeting
    number: int
    wanted: Callable[[], bool]
    on_leaving: Callable[[], None]
    prefill: bool = False
    patient = True

    def open(self, hear: Callable[[FromEngine], None]) -> RemoteEngine:
        return RemoteEngine(self, hear)

    def close(self) -> None:
        """Close nothing: the engine is closed already, and the meeting has another owner."""


class RemoteEngine:
    """An `EngineHandle` of another machine, from before there is one."""

    def __init__(self, place: RemotePlace, hear: Callable[[FromEngine], None]) -> None:
        loop = asyncio.get_running_loop()
        self.place = place
        self._hear = hear
        self._line: Line | None = None
        self._attached: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._ended: asyncio.Future[Died | None] = loop.create_future()
        place.meeting.vacant.add(self)

    def attach(self) -> LineAddress:
        """Return the address where the engine's host, which has come, is to connect."""
        meeting = self.place.meeting
        self._line, address = Line.open(meeting.context, meeting.host, self._take, self.kill)
        self._attached.set_result(None)
        return address

    def send(self, message: ToEngine) -> None:
        if self._line is not None:
            self._line.pipes.send(message)

    async def ready(self) -> Ready:
        """Wait for an engine. Raises DiedAtStart where a host came and did not connect, or left."""
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
        """Count the engine as lost: its host learns of the loss, or is gone, too."""
        if not self._ended.done():
            self._ended.set_result(None)

    def in_step(self) -> Mapping[int, int] | None:
        died = self._ended.result() if self._ended.done() else None
        return None if died is None else died.in_step

    async def end(self, patience: float = 0.0) -> None:
        self.place.meeting.vacant.discard(self)
        if self._ready.done() and self._line is not None:
            self._line.pipes.send_now(Stop())
            await asyncio.wait({self._ended}, timeout=patience + STOP_GRACE_SECONDS)

    def close(self) -> None:
        self.place.meeting.vacant.discard(self)
        if self._line is not None:
            self._line.close(linger=1000)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Leaving):
            self.place.on_leaving()
        elif isinstance(message, Died):
            if not self._ended.done():
                self._ended.set_result(message)
        else:
            self._hear(message)
