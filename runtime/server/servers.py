"""What answers in front of engines: the servers for programs and for HTTP.

`app` imports this module while the first engine starts, which takes longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


@asynccontextmanager
async def answering(
    served: ServedModel | ModelRegistry, store: SessionStore | None = None
) -> AsyncIterator[tuple[ProgramServer, str | None]]:
    """Both servers while the block runs, in front of one model or of several; what programs do is
    kept in `store`. Gives that for programs, and the address for HTTP, None where there is none."""
    programs, http_address = ProgramServer(served, store), None
    runner: web.AppRunner | None = None
    try:
        served.program_address = programs.start()
        if served.config.http_port is not None:
            if isinstance(served, ModelRegistry):
                runner = make_rooms_runner(served)
            else:
                runner = make_runner(served)
            http_address = await _listen(runner, served.config)
            quiet_accepts(asyncio.get_running_loop())
        yield programs, http_address
    finally:
        if runner is not None:
            await runner.cleanup()
        await programs.stop()


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
