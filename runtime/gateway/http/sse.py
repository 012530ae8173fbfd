"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.errors import error_body
from rootlace.wire.errors import RootlaceError

log = logging.getLogger(__name__)


async def stream_events(
    request: web.Request, payloads: AsyncGenerator[object, None]
) -> web.StreamResponse:
    """Send each payload as one `data:` event, then `[DONE]`.

    The reply starts with the first payload, so an error before it still has its own HTTP status; a
    later error is sent as an event in OpenAI's error shape. However this ends, the client
    disconnecting included, the generator is closed, which cancels its work.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    async with aclosing(payloads):
        try:
            async for payload in payloads:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_event(payload))
        except ConnectionResetError:
            raise
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, RootlaceError):
                log.exception("%s %s failed while streaming", request.method, request.path)
            await response.write(_event(error_body(error)))
    if not response.prepared:
        await response.prepare(request)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(payload: object) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
