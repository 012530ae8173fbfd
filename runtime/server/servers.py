"""What answers in front of engines: the servers for programs and for HTTP.

`app` imports this module while the first engine starts, which takes longer.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.http.app import make_runner
from rootlace.runtime.server.http.connections import quiet_accepts
from rootlace.runtime.server.http.model_routes import make_rooms_runner
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.programs import ProgramServer
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.session_store import SessionStore
from rootlace.wire.errors import InvalidRequest


class Servers:
    """Both servers, in front of one model or of several."""

    def __init__(
        self, served: ServedModel | ModelRegistry, store: SessionStore | None = None
    ) -> None:
        """What programs do is kept in `store`."""
        self._served = served
        self._programs = ProgramServer(served, store)
        self._runner: web.AppRunner | None = None

    async def start(self) -> tuple[str, str | None]:
        """The addresses for programs and for HTTP, None where there is no HTTP."""
        served, http_address = self._served, None
        served.program_address = self._programs.start()
        if served.config.http_port is not None:
            if isinstance(served, ModelRegistry):
                self._runner = make_rooms_runner(served)
            else:
                self._runner = make_runner(served)
            http_address = await _listen(self._runner, served.config)
            quiet_accepts(asyncio.get_running_loop())
        return served.program_address, http_address

    async def drain(self, seconds: float, stop: asyncio.Event) -> None:
        """Refuse new work, and wait until what was running has ended, or `seconds` are over, or
        `stop` is set."""
        await self._served.drain.run(lambda: self._programs.busy, seconds, stop)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._programs.stop()


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> str:
    """Begin to answer; the URL."""
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.http_port).start()
    except OSError as error:
        await runner.cleanup()
        raise InvalidRequest(
            f"cannot listen on {config.host}:{config.http_port}: {error}"
        ) from error
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
