"""A client that takes little of the machine that it shares with the server."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_LENGTH = b"content-length:"


class Client:
    """POSTs JSON over kept connections, one for each answer that is awaited at the same time."""

    def __init__(self, url: str, address: str) -> None:
        """`address`: the client's own, by which the server distinguishes clients."""
        to = urlsplit(url)
        assert to.hostname is not None and to.port is not None
        self._host, self._port, self._address = to.hostname, to.port, address
        self._idle: deque[_Connection] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._idle:
            self._idle.pop().close()

    async def post(self, path: str, body: bytes) -> int:
        """Return the whole reply's status. Raises OSError if a connection fails."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        while self._idle and self._idle[-1].closed:  # the server closes idle ones
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        status = await connection.ask(head.encode() + body)
        self._idle.append(connection)
        return status

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, local_addr=(self._address, 0)
        )
        return connection


class _Connection(asyncio.Protocol):
    """Sends one request at a time; replies tell their length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._reply: asyncio.Future[int] | None = None
        self._got = b""

    def ask(self, request: bytes) -> asyncio.Future[int]:
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._reply

    @property
    def closed(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end or self._reply is None:
            return
        status, *fields = head.lower().split(b"\r\n")
        length = next(int(one[len(_LENGTH) :]) for one in fields if one.startswith(_LENGTH))
        if len(body) >= length and not self._reply.done():
            self._got = b""
            self._reply.set_result(int(status.split()[1]))

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionResetError("the connection was closed"))
