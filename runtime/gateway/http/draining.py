"""What HTTP clients see of a server that is stopping."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.drain import Drain
from rootlace.runtime.gateway.http.errors import Handler

PROBES = ("/ready", "/health_generate")
_READING = ("GET", "HEAD", "OPTIONS")
# They end what is running, or let it end.
_ENDING = ("/abort", "/abort_request", "/continue_generation")


def drain_middleware(drain: Drain) -> Middleware:
    """Refuse new work once the server is stopping, and count what is being answered.

    Who only looks (`/health`, `/metrics`, the cache) still may, and whoever ends requests.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PROBES:
            drain.check()
        if request.method in _READING or request.path in _ENDING:
            return await handler(request)
        with drain.request():
            return await handler(request)

    return check
