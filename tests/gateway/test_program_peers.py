"""What peers on TCP cost that never end a message, never say hello, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest

from rootlace.runtime.gateway import program_peers
from rootlace.runtime.gateway import server as server_module
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.wire.protocol import PROTOCOL_VERSION, Append, Done, Hello, Open, Text, encode
from tests.gateway.test_server import World, world
from tests.waiting import soon, until

MORE, LONG = 1, 2
Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def frame(body: bytes, flags: int = 0) -> bytes:
    """Of ZMTP 3, with a length of eight bytes."""
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


async def raw_peer(w: World) -> Raw:
    """One that speaks ZMTP 3 by hand, as a DEALER."""
    host, _, port = w.address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    await soon(reader.readexactly(64))
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    command = b"\x05READY" + kind
    writer.write(bytes([4, len(command)]) + command)
    head = await soon(reader.readexactly(2))
    await soon(reader.readexactly(head[1]))
    return reader, writer


async def ended(peer: Raw) -> None:
    with contextlib.suppress(ConnectionError):
        while await soon(peer[0].read(2**16)):
            pass
    peer[1].close()


async def pour(peer: Raw, most: int) -> int:
    """Send frames of a message that has no end, until somebody ends the connection."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:  # whatever the other side says
            peer[1].write(frame(bytes(2**16), MORE))
            await peer[1].drain()
            sent += 2**16
            await asyncio.sleep(0)
    return sent


async def hello(peer: Raw) -> None:
    peer[1].write(frame(encode([Hello(0, PROTOCOL_VERSION)])))
    assert await soon(peer[0].read(2**16))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.01)


@pytest.mark.parametrize("known", [False, True])
async def test_a_message_that_does_not_end_is_cut_off(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(program_peers, "UNKNOWN_BYTES", 2**18)
    monkeypatch.setattr(program_peers, "SLACK_BYTES", 2**16)
    async with world(stories, max_message_bytes=2**18, client_timeout=1e6) as w:
        good, bad = await w.ready(), await raw_peer(w)
        if known:
            await hello(bad)
        assert await pour(bad, 2**30) < 2**30
        await ended(bad)
        await good.send(Open(1, 1), Append(2, 1, (Text("x" * 2**17),)))
        assert isinstance(await good.terminal(1), Done)


async def test_all_that_is_not_whole_has_a_bound(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself is within its own."""
    monkeypatch.setattr(program_peers, "MESSAGES", 3)
    async with world(stories, max_message_bytes=2**18, client_timeout=1e6) as w:
        peers = [await raw_peer(w) for _ in range(4)]
        for peer in peers:
            await hello(peer)
        known = w.server._socket._peers
        assert known is not None
        # What comes before the next look may belong to the hello.
        await until(lambda: all(one.whole and not one.heard for one in known._peers.values()))
        assert len(known._peers) == 4
        for size, peer in zip((1, 2, 3, 4), peers, strict=True):
            peer[1].write(frame(bytes(2**16), MORE) * size)
        await until(lambda: sum(one.unfinished for one in known._peers.values()) > 10 * 2**16)
        largest = peers[-1]
        largest[1].write(frame(bytes(2**16), MORE) * 3)
        await ended(largest)
        assert not any(reader.at_eof() for reader, _ in peers[:3])
        for _, writer in peers[:3]:
            writer.close()


async def test_who_never_says_hello_goes(stories: Tokenizer) -> None:
    async with world(stories, client_timeout=0.1) as w:
        silent = await raw_peer(w)
        garbage = await raw_peer(w)
        garbage[1].write(frame(b"\xff"))
        for peer in (silent, garbage):
            await ended(peer)


async def test_where_there_are_too_many_the_oldest_without_a_session_goes(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_peers, "SPARE", 1)
    async with world(stories, max_connections=2, client_timeout=1e6) as w:
        first = await raw_peer(w)
        await hello(first)
        second, third = await raw_peer(w), await raw_peer(w)
        good = await w.ready()
        await ended(second)
        await good.send(Open(1, 1))
        assert isinstance(await good.terminal(1), Done)
        assert not first[0].at_eof() and not third[0].at_eof()
        for _, writer in (first, third):
            writer.close()
