"""An engine of this machine for a gateway of another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import zmq

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    Died,
    FromEngine,
    GetStats,
    Leaving,
    Ready,
    Stats,
    Stop,
    ToEngine,
)
from rootlace.runtime.contracts.transfer import TransferConfig
from rootlace.runtime.engine.client.child_engine import ChildEngine, Children
from rootlace.runtime.engine.client.engine_client import SPILL_SECONDS
from rootlace.runtime.replicas.line import Line, LineAddress

log = logging.getLogger(__name__)

Attach = Callable[[], Awaitable[LineAddress | None]]

RETRY_SECONDS = 1.0
_OWN_TICKET = -1
"""Of the host's own questions; the gateway's are positive."""


class Host:
    """Starts an engine process, looks for the gateway with `attach`, and carries what the two say.

    An engine that dies is started again, and so is one whose gateway is lost, or sent it away: it
    may hold requests that nobody knows of any more. Belongs to the event loop that `start` ran on.
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
        """The gateway is lost, or has no use for the engine any more."""
        self._serving: asyncio.Task[None] | None = None
        self._stats: asyncio.Future[dict[str, Any]] | None = None
        self.leaving = False

    async def start(self) -> None:
        """Returns when the model is loaded. Raises what the engine gives as its reason."""
        ready = await self._start_engine()
        self._serving = asyncio.create_task(self._serve(ready))

    def check(self) -> None:
        """Raises why it does not go on."""
        if self._serving is not None and self._serving.done() and not self.leaving:
            self._serving.result()

    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        if self._stats is None or self._stats.done():
            self._stats = asyncio.get_running_loop().create_future()
        if self._engine is not None:
            self._engine.send(GetStats(_OWN_TICKET))
        return await asyncio.shield(self._stats)

    async def leave(self, seconds: float) -> None:
        """Ask the gateway to give it nothing new, and let what runs end for so many seconds; then
        the engine ends."""
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
        """Between this engine and this gateway, until one of them is gone."""
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
