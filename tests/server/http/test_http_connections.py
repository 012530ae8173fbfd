"""Bounds on connections: idle ones make room, busy ones do not, the log stays short."""

import asyncio
import errno
import logging
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rootlace.runtime import processes
from rootlace.runtime.server.http import connections
from rootlace.runtime.server.http.connections import (
    MOST,
    ServerLog,
    most_connections,
    owner_of,
    quiet_accepts,
)
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import PAUSE, FakeModel
from tests.waiting import soon, until

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"text": "a", "stream": true}'
STREAM = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Peers:
    """Clients on raw sockets, each from a chosen address of this machine."""

    def __init__(self, served: Served) -> None:
        self._port = served.runner.addresses[0][1]
        self._open: list[asyncio.StreamWriter] = []

    async def connect(self, address: str = "127.0.0.1") -> Peer:
        peer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))
        self._open.append(peer[1])
        return peer

    async def ask(self, peer: Peer, what: bytes = GET) -> bytes:
        """Return the reply's status line; leave the rest unread, except for a GET."""
        peer[1].write(what)
        head = await soon(peer[0].readuntil(b"\r\n\r\n"))
        if what == GET:
            lengths = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
            await peer[0].readexactly(int(lengths[0].split()[1]))
        return head.partition(b"\r\n")[0]

    async def busy(self, address: str = "127.0.0.1") -> Peer:
        """Connect a client whose reply has begun and does not end."""
        peer = await self.connect(address)
        assert await self.ask(peer, STREAM) == b"HTTP/1.1 200 OK"
        return peer

    async def refused(self, address: str = "127.0.0.1") -> bytes:
        """Return all bytes that a refused client gets."""
        reader, _ = await self.connect(address)
        return await soon(reader.read())

    def close(self) -> None:
        for writer in self._open:
            writer.close()


@asynccontextmanager
async def place(serve: Serve, most: int) -> AsyncIterator[Peers]:
    model = FakeModel(max_http_connections=most)
    model.script = lambda prompt, index: "he" + PAUSE
    peers = Peers(await serve(model))
    yield peers
    peers.close()


async def test_idle_connections_make_room(serve: Serve) -> None:
    """The connection that was idle longest is closed, even if it was opened after others."""
    async with place(serve, 3) as peers:
        first, second, third = [await peers.connect() for _ in range(3)]
        assert await peers.ask(second) == b"HTTP/1.1 200 OK"
        assert await peers.ask(third) == b"HTTP/1.1 200 OK"
        assert await peers.ask(first) == b"HTTP/1.1 200 OK"
        fourth = await peers.connect()
        assert await soon(second[0].read()) == b""
        for peer in (first, third, fourth):
            assert await peers.ask(peer) == b"HTTP/1.1 200 OK"


async def test_busy_connections_stay(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with place(serve, 2) as peers:
        streams = [await peers.busy() for _ in range(2)]
        for _ in range(5):
            reply = await peers.refused()
            assert reply.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in reply
            assert b"too many connections" in reply
        assert all(not reader.at_eof() for reader, _ in streams)
        assert len([r for r in caplog.records if r.name == connections.__name__]) == 1
        streams[0][1].close()  # a client that leaves, or has its answer, makes room
        await until(lambda: streams[0][1].transport.is_closing())
        while b"503" in await peers.ask(last := await peers.connect()):
            await asyncio.sleep(0)
        assert await peers.ask(last) == b"HTTP/1.1 200 OK"


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have 127.0.0.1 only, not all of 127.0.0.0/8"
)
async def test_one_address_leaves_some_to_others(serve: Serve) -> None:
    async with place(serve, 16) as peers:
        for _ in range(14):
            await peers.busy()
        assert b"503" in await peers.refused()
        own = [await peers.connect("127.0.0.2") for _ in range(2)]
        for peer in own:
            assert await peers.ask(peer) == b"HTTP/1.1 200 OK"
        # All are taken: an idle connection is closed, but not for a client with more than others.
        assert b"503" in await peers.refused()
        assert await peers.ask(own[0]) == b"HTTP/1.1 200 OK"
        assert await peers.ask(await peers.connect("127.0.0.3")) == b"HTTP/1.1 200 OK"
        assert await soon(own[1][0].read()) == b""


async def test_what_is_no_http_is_one_line_of_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(FakeModel())
    address = served.url.removeprefix("http://").split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\nA B: c\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(garbage)
        assert (await reader.read()).startswith(b"HTTP/1.")
        writer.close()
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].exc_info is None
    assert "not HTTP" in told[0].getMessage() and len(told[0].getMessage().splitlines()) == 1


def test_a_fault_of_ours_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("ours")
    except ValueError as error:
        ServerLog().exception("Error handling request from %s", "a", exc_info=error)
    (record,) = caplog.records
    assert record.exc_info is not None and record.getMessage() == "Error handling request from a"


def test_an_ipv6_network_is_one_owner() -> None:
    own = {owner_of(f"2001:db8:1:2:{tail}") for tail in (":1", "ffff:1:2:3", "0:0:0:9")}
    assert len(own) == 1
    assert owner_of("2001:db8:1:3::1") not in own
    assert owner_of("fe80::1%eth0") == owner_of("fe80::2")
    assert owner_of("::ffff:10.0.0.1") == owner_of("10.0.0.1") != owner_of("10.0.0.2")
    assert owner_of("") == ""  # a Unix socket


async def test_descriptors_that_are_gone_are_told_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    try:
        quiet_accepts(loop)
        gone = {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")}
        for _ in range(1000):
            loop.call_exception_handler(gone)
        assert len(caplog.records) == 1
        loop.call_exception_handler({"message": "another", "exception": ValueError("x")})
        assert caplog.records[1].name == "asyncio" and caplog.records[1].levelno == logging.ERROR
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("limits", "taken", "most"),
    [
        ((1024, 4096), 4096, 2048),
        ((1024, resource.RLIM_INFINITY), processes.DESCRIPTORS, MOST),
        ((100_000, 200_000), None, MOST),
        ((64, 64), None, 32),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, MOST),
    ],
)
def test_the_bound_follows_the_descriptors(
    limits: tuple[int, int], taken: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = limits

    def set_(which: int, wanted: tuple[int, int]) -> None:
        nonlocal now
        now = wanted

    def get(*_: Any) -> tuple[int, int]:
        return now

    monkeypatch.setattr(resource, "getrlimit", get)
    monkeypatch.setattr(resource, "setrlimit", set_)
    processes.take_descriptors()
    assert now == (limits[0] if taken is None else taken, limits[1])
    assert (most_connections(None), most_connections(7)) == (most, 7)


async def test_a_new_connection_is_not_idle_before_it_could_ask(serve: Serve) -> None:
    async with place(serve, 2) as peers:
        busy = await peers.busy()
        first = await peers.connect()
        assert (await peers.refused()).startswith(b"HTTP/1.1 503 ")
        assert await peers.ask(first) == b"HTTP/1.1 200 OK"
        assert not busy[0].at_eof()


async def test_a_refused_body_is_read_before_its_connection_is_idle(serve: Serve) -> None:
    async with place(serve, 1) as peers:
        reader, writer = await peers.connect()
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
        writer.write(head + b"Content-Length: 99\r\n\r\n{")
        assert await soon(reader.readline()) == b"HTTP/1.1 415 Unsupported Media Type\r\n"
        assert (await peers.refused()).startswith(b"HTTP/1.1 503 ")
        assert b"the body is text/plain" in await soon(reader.readuntil(b"}"))
