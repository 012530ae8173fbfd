"""Streamed replies: server-sent events, in two dialects, and lines of JSON."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter

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


class DirectEvents:
    """A short way into a stream: what can be written without waiting need not wake the task that
    answers the request.

    It is open between the first payload, which begins the reply, and the end, while the client
    reads as fast as we write. `stream_events` opens it.
    """

    def __init__(self) -> None:
        self._writer: StreamWriter | None = None
        self._encode: Callable[[Any], bytes] = _data

    def begin(self, writer: AbstractStreamWriter | None, encode: Callable[[Any], bytes]) -> None:
        """The reply's head was written to `writer`. Without chunks (HTTP/1.0) this stays closed."""
        if isinstance(writer, StreamWriter) and writer.chunked:
            self._writer, self._encode = writer, encode

    def end(self) -> None:
        self._writer = None

    def is_open(self) -> bool:
        writer = self._writer
        if writer is None or writer.protocol.writing_paused:
            return False
        transport = writer.transport
        return transport is not None and not transport.is_closing()

    def write(self, payloads: Sequence[Any]) -> None:
        """Send payloads together. Only while this is open."""
        writer = self._writer
        assert writer is not None and writer.transport is not None
        data = b"".join(map(self._encode, payloads))
        if data:
            chunk = b"%x\r\n%b\r\n" % (len(data), data)
            writer.output_size += len(chunk)  # the access log tells it
            writer.transport.write(chunk)


async def stream_events(
    request: web.Request,
    payloads: AsyncGenerator[Any, None],
    dialect: Dialect = OPENAI,
    direct: DirectEvents | None = None,
) -> web.StreamResponse:
    """Send each payload as one event, then the end. Payloads that come as a list are sent together:
    what the system takes for sending is much of what a short event costs.

    The reply starts with the first payload, so an error before it still has its own HTTP status; a
    later error is sent as an event in the endpoint's error shape. However this ends, the client
    disconnecting included, the generator is closed, which cancels its work. `direct`: where the
    generator writes payloads that it does not give.
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
                data = b"".join(map(dialect.encode, together))
                if response.prepared:
                    await response.write(data)
                    continue
                writer = await response.prepare(request)
                await response.write(data)
                if direct is not None:
                    direct.begin(writer, dialect.encode)
        except ConnectionResetError:
            raise
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, RootlaceError):
                log.exception("%s %s failed while streaming", request.method, request.path)
            await response.write(dialect.encode(error_body(error, request.path)))
        finally:
            if direct is not None:
                direct.end()
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof(dialect.end)
    return response
