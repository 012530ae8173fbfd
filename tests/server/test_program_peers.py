"""The cost of peers on TCP that never end a message, never say hello, or are too many."""

import asyncio
import contextlib
import os
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server import program_peers
from rootlace.runtime.server import programs as server_module
from rootlace.runtime.server.program_peers import ProgramPeers
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import PROTOCOL_VERSION, Append, Done, Failed, Hello, Open, Text, encode
from tests.server.test_server import World, world
from tests.waiting import PATIENCE, eventually, soon, until

MORE, LONG = 1, 2
Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]
tells_bytes = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell how many bytes came"
)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Make a frame of ZMTP 3, with a length of eight bytes."""
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


async def raw_peer(w: World) -> Raw:
    """Connect a peer that speaks ZMTP 3 by hand, as a DEALER."""
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
    """Send frames of an endless message until the other side closes the connection."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:  # whatever the other side answers
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


@tells_bytes
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


@tells_bytes
async def test_all_that_is_not_whole_has_a_bound(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unfinished message is within its own bound."""
    monkeypatch.setattr(program_peers, "MESSAGES", 3)
    async with world(stories, max_message_bytes=2**18, client_timeout=1e6) as w:
        peers = [await raw_peer(w) for _ in range(4)]
        for peer in peers:
            await hello(peer)
        known = w.server._socket._peers
        assert known is not None
        # A message before the next check may belong to the hello.
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


class Bound:
    """A socket and its peers, whose events are read only when a test lets the loop run."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self._port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        config = GatewayConfig(model="m", program_address="tcp://127.0.0.1:1", client_timeout=1e6)
        self.peers = ProgramPeers(self.socket, self._port, config, lambda _: True)

    def connect(self) -> socket.socket:
        """Open a connection that ZeroMQ has accepted: it has sent its greeting."""
        connection = socket.create_connection(("127.0.0.1", self._port), PATIENCE)
        assert connection.recv(1)
        return connection

    async def descriptors(self, count: int) -> list[int]:
        await until(lambda: len(self.peers._peers) == count)
        return list(self.peers._peers)

    def close(self) -> None:
        self.peers.close()
        self._context.destroy(linger=0)


@pytest.fixture
async def bound() -> AsyncIterator[Bound]:
    bound = Bound()
    yield bound
    bound.close()


def next_descriptor() -> int:
    """Return the lowest free descriptor."""
    free = os.dup(0)
    os.close(free)
    return free


async def test_a_reset_at_any_moment_drops_one_peer(
    bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = [bound.connect()]
    first = (await bound.descriptors(1))[0]
    connections.append(bound.connect())
    await bound.descriptors(2)
    open_ = bound.peers._open

    def gone(connection: socket.socket) -> bool:
        try:
            return not connection.getpeername()
        except OSError:
            return True

    def reset_behind(descriptor: int) -> tuple[socket.socket, object]:
        opened = open_(descriptor)
        if descriptor == first:
            linger = struct.pack("ii", 1, 0)
            connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connections[0].close()
            eventually(lambda: gone(opened[0]))
        return opened

    def received(connection: socket.socket) -> int:
        connection.getpeername()
        return 1

    monkeypatch.setattr(bound.peers, "_open", reset_behind)
    monkeypatch.setattr(program_peers, "_received", received)
    bound.peers.look(1.0)
    (left,) = bound.peers._peers.values()
    assert left.received == 1
    connections[1].close()


async def test_a_descriptor_that_is_a_file_by_now_leaves_none_open(bound: Bound) -> None:
    with Path(os.devnull).open() as file:
        bound.peers._peers[file.fileno()] = program_peers._Peer()
        free = next_descriptor()
        bound.peers.look(1.0)
        assert next_descriptor() == free and not bound.peers._peers


async def test_a_message_counts_for_a_connection_that_is_there(bound: Bound) -> None:
    client = zmq.Context.instance().socket(zmq.DEALER)
    client.connect(bound.socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0"))  # type: ignore[union-attr,arg-type]
    client.send(b"hello")
    identity, frame = bound.socket.recv_multipart(copy=False)
    descriptor = int(frame.get(zmq.SRCFD))
    assert not bound.peers._peers  # the loop has not run since the connection was accepted
    bound.peers.heard(descriptor, identity.bytes)
    assert bound.peers._peers[descriptor].identity == identity.bytes
    client.close(0)
    await bound.descriptors(0)
    bound.peers.heard(descriptor, identity.bytes)
    assert not bound.peers._peers


async def test_a_late_message_does_not_count_for_who_has_its_descriptor_now(bound: Bound) -> None:
    """Otherwise a stranger could send as much as a client."""
    descriptor, peers = 10**6, bound.peers

    def tell(*kinds: int) -> None:
        for kind in kinds:
            peers._note([program_peers._EVENT.pack(kind, descriptor)])

    tell(zmq.EVENT_ACCEPTED)
    peers.heard(descriptor, b"\0old")
    tell(zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED)
    peers.heard(descriptor, b"\0old")
    stranger = peers._peers[descriptor]
    assert not stranger.known and not stranger.heard
    peers.heard(descriptor, b"\0new")
    assert stranger.known and stranger.heard
    # ZeroMQ chooses a name once, but a peer with a chosen name may return.
    peers.heard(descriptor, b"me")
    tell(zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED)
    peers.heard(descriptor, b"me")
    assert peers._peers[descriptor].known


async def test_without_a_descriptor_nobody_is_forgotten(bound: Bound) -> None:
    connections = [bound.connect() for _ in range(2)]
    await bound.descriptors(2)
    bound.peers._max_peers = 1
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = bound.connect()
    free = next_descriptor()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        bound.peers.look(1.0)
        await bound.descriptors(3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    bound.peers.look(1.0)
    assert len(bound.peers._peers) == 3
    for connection in (*connections, late):
        connection.close()


async def test_a_flood_while_the_loop_stands_still_does_not_hang_the_end() -> None:
    """Each connection is two events, and ZeroMQ's default queue holds 2,000."""
    bound = Bound()
    try:
        for _ in range(1100):
            bound.connect().close()
    except TimeoutError:
        while bound.peers._monitor.poll(100):  # otherwise `close` never ends
            bound.peers._monitor.recv_multipart()
        raise
    finally:
        bound.close()


async def test_a_turn_that_fails_does_not_end_the_watch(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(stories, client_timeout=0.05) as w:
        turns = 0

        def look(seconds: float) -> None:
            nonlocal turns
            turns += 1
            raise OSError("no")

        monkeypatch.setattr(w.server._socket, "look", look)
        silent = await w.ready()
        await until(lambda: turns > 2 and w.model.session_count == 0)
        assert await silent.until(lambda event: isinstance(event, Failed))
        assert "could not look after" in caplog.text


async def test_who_cannot_be_sent_to_does_not_end_what_is_sent_to_others(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "RETRY_SECONDS", 0.001)
    async with world(stories) as w:
        good, bad = await w.ready(), await w.ready()
        send, full = w.server._socket.send, True
        first, second = w.server._connections

        def fail(identity: bytes, frame: bytes) -> zmq.ZMQError | None:
            if identity == second and not full:
                raise OSError("no")
            return zmq.Again() if full else send(identity, frame)

        monkeypatch.setattr(w.server._socket, "send", fail)
        await good.send(Open(1, 1))
        await bad.send(Open(1, 1))
        await until(lambda: len(w.server._behind) == 2)
        full = False
        await until(lambda: not w.server._behind)
        assert list(w.server._connections) == [first]
        assert isinstance(await good.terminal(1), Done)
        assert "could not look after" in caplog.text


async def test_a_task_that_failed_does_not_keep_the_server_from_stopping(
    stories: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise OSError("no")

    async with world(stories) as w:
        w.server._tasks.append(asyncio.create_task(fail()))
        await until(lambda: w.server._tasks[-1].done())
    assert "had failed" in caplog.text
    assert w.server._socket._context.closed
