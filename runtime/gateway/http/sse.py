"""Streamed replies: server-sent events, in two dialects, and lines of JSON."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.errors import error_body
from rootlace.wire.errors import RootlaceError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dialect:
    """How a stream is written: each payload, and what comes last."""

    content_type: str
    encode: Callable[[Any], bytes]
    end: bytes = b""


def _data(payload: object) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def _named(payload: dict[str, Any]) -> bytes:
    return b"event: " + payload.get("type", "error").encode() + b"\n" + _data(payload)


def _line(payload: object) -> bytes:
    return msgspec.json.encode(payload) + b"\n"


_EVENTS = "text/event-stream; charset=utf-8"
OPENAI = Dialect(_EVENTS, _data, b"data: [DONE]\n\n")
NAMED_EVENTS = Dialect(_EVENTS, _named)
"""Events whose name is their payload's `type`."""
LINES = Dialect("application/x-ndjson", _line)


async def stream_events(
    request: web.Request, payloads: AsyncGenerator[Any, None], dialect: Dialect = OPENAI
) -> web.StreamResponse:
    """Send each payload as one event, then the end. Payloads that come as a list are sent together:
    what the system takes for sending is most of what a short event costs.

    The reply starts with the first payload, so an error before it still has its own HTTP status; a
    later error is sent as an event in the endpoint's error shape. However this ends, the client
    disconnecting included, the generator is closed, which cancels its work.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": dialect.content_type,
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    async with aclosing(payloads):
        try:
            async for payload in payloads:
                together = payload if isinstance(payload, list) else [payload]
                if not together:
                    continue
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b"".join(map(dialect.encode, together)))
        except ConnectionResetError:
            raise
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, RootlaceError):
                log.exception("%s %s failed while streaming", request.method, request.path)
            await response.write(dialect.encode(error_body(error, request.path)))
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof(dialect.end)
    return response
