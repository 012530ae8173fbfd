"""Whether the server is up, whether it is ready, and what it measures."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.replies import Status, check_model, json_response
from rootlace.runtime.gateway.http.warming import generate
from rootlace.runtime.gateway.metrics import CONTENT_TYPE
from rootlace.wire.errors import RootlaceError, ServerUnavailable

READY_SECONDS = 10.0
"""A token this long ago shows that the engine works; a probe may take as long."""


class Health:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._probe: asyncio.Task[None] | None = None

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine answers; needs no API key."""
        if not self._gateway.healthy:
            raise ServerUnavailable("the engine does not answer")
        return json_response(Status("ok"))

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 if a token can be generated now."""
        await generate(self._gateway, 1)
        return json_response(Status("ok"))

    async def ready(self, request: web.Request) -> web.Response:
        """200 if a token went through the engine lately; needs no API key. 404 if another model
        than this one is asked for (`?model=`).

        If no token did, one is made: one at a time, however many ask.
        """
        check_model(self._gateway, request.query.get("model"))
        if time.monotonic() - self._gateway.last_token > READY_SECONDS:
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(generate(self._gateway, 1))
            try:
                await asyncio.wait_for(asyncio.shield(self._probe), READY_SECONDS)
            except TimeoutError:
                raise ServerUnavailable(
                    f"no token went through the engine in {READY_SECONDS:g} seconds"
                ) from None
            except RootlaceError as error:
                raise ServerUnavailable(f"no token can be made: {error}") from None
        return json_response(Status("ready"))

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus."""
        try:
            status = await self._gateway.status()
        except RootlaceError:
            status = None
        body = self._gateway.metrics.text(status)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
