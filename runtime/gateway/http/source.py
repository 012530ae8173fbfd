"""Where a request comes from: among those without an API key, who shares the engine with whom."""

from __future__ import annotations

from contextvars import ContextVar

from aiohttp import web

from rootlace.runtime.gateway.http.errors import Handler

_SOURCE: ContextVar[str] = ContextVar("source", default="batches")


@web.middleware
async def source_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let what the handler starts know the client's address."""
    _SOURCE.set(request.remote or "unknown")
    return await handler(request)


def source() -> str:
    """The address of the client whose request the running task answers, or "batches"."""
    return _SOURCE.get()
