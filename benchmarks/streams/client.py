"""A cheap client that reads many streams: its CPU time is taken from servers on the same cores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

_EVENT = b"data: "
_END = b"0\r\n\r\n"
"""The last chunk of a reply."""
_KEPT = 4096
"""How much of a reply's end is kept: its last events, with the usage."""


@dataclass(frozen=True)
class Streamed:
    """Received from several streams: pieces of text, and tokens as the server counts them."""

    events: int
    tokens: int


def chat_body(model: str, number: int, tokens: int) -> bytes:
    """Return a body that asks for exactly so many tokens of a chat, as a stream."""
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Some words, then question {number}"}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def read_streams(url: str, bodies: Sequence[bytes]) -> Streamed:
    """Send all requests at once, each on its own connection, and read the streams.

    Raises RuntimeError if one is refused or its connection is lost.
    """
    loop = asyncio.get_running_loop()
    place = urlsplit(url)
    assert place.hostname is not None and place.port is not None
    streams = [
        (await loop.create_connection(_Stream, place.hostname, place.port))[1] for _ in bodies
    ]
    try:
        for stream, body in zip(streams, bodies, strict=True):
            stream.ask(place.netloc, body)
        counts = await asyncio.gather(*(stream.done for stream in streams))
    finally:
        for stream in streams:
            stream.close()
    return Streamed(sum(one.events for one in counts), sum(one.tokens for one in counts))


class _Stream(asyncio.Protocol):
    """One connection, for one request."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Streamed] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, host: str, body: bytes) -> None:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        # The border of two pieces may cut an event, whose beginning is searched again.
        border = self._tail[1 - len(_EVENT) :]
        self._events += (border + data).count(_EVENT)
        self._tail = (self._tail + data)[-_KEPT:]
        if self._tail.endswith(_END) and not self.done.done():
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"a stream was lost: {self._tail[-300:]!r}"))

    def close(self) -> None:
        self.done.cancel()
        self._transport.close()

    def _end(self) -> None:
        at = self._tail.rfind(b'"completion_tokens":')
        digits = self._tail[at:].split(b":", 1)[1].lstrip() if at >= 0 else b""
        count = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
        if not count:
            self.done.set_exception(RuntimeError(f"no stream: {self._tail[-300:]!r}"))
            return
        # Events without text: the usage, and "[DONE]".
        self.done.set_result(Streamed(self._events - 2, int(count)))
