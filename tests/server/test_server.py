"""The ZeroMQ side over real sockets."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from rootlace.client.connection import Connection
from rootlace.runtime.server import programs
from rootlace.runtime.server import programs as server_module
from rootlace.runtime.server.auth import new_key, write_keys
from rootlace.runtime.server.programs import ProgramServer
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import (
    PROTOCOL_VERSION,
    Append,
    Chunk,
    Close,
    Done,
    Event,
    Failed,
    Generate,
    Generated,
    Goodbye,
    Hello,
    Op,
    Open,
    Ping,
    Prefill,
    SamplingParams,
    Text,
    Welcome,
    decode_events,
    encode,
)
from tests.server.conftest import make_model
from tests.server.fake_engine import FakeEngine
from tests.waiting import soon, until


class Peer:
    """A DEALER socket."""

    def __init__(self, context: zmq.asyncio.Context, address: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)
        self.events: list[Event] = []

    async def send(self, *ops: Op) -> None:
        await self.socket.send(encode(list(ops)))

    async def raw(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def until(self, found: Callable[[Event], bool]) -> Event:
        """Receive events until one satisfies the condition."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                if found(event):
                    return event
            seen = len(self.events)
            frame = await soon(self.socket.recv())
            self.events += decode_events(frame)

    async def terminal(self, op: int) -> Event:
        return await self.until(lambda e: e.op == op and not isinstance(e, Chunk))

    async def hello(self, **fields: Any) -> Event:
        await self.send(Hello(0, **{"version": PROTOCOL_VERSION, **fields}))
        return await self.terminal(0)


class World:
    def __init__(self, model: ServedModel, engine: FakeEngine, server: ProgramServer) -> None:
        self.model, self.engine, self.server = model, engine, server
        self.context = zmq.asyncio.Context()
        self.address = server.start()
        self.peers: list[Peer] = []

    def peer(self, **options: int) -> Peer:
        self.peers.append(Peer(self.context, self.address, **options))
        return self.peers[-1]

    async def ready(self, **options: int) -> Peer:
        peer = self.peer(**options)
        assert isinstance(await peer.hello(), Welcome)
        return peer


@asynccontextmanager
async def world(tokenizer: Tokenizer, **config: Any) -> AsyncIterator[World]:
    config = {"program_address": "tcp://127.0.0.1:0", **config}
    model, engine = make_model(tokenizer, eos=(2,), **config)
    here = World(model, engine, ProgramServer(model))
    try:
        yield here
    finally:
        for peer in here.peers:
            peer.socket.close()
        await here.server.stop()
        here.context.term()
        model.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.05)


async def test_a_program(stories: Tokenizer, tmp_path: Any) -> None:
    async with world(stories, program_address=f"ipc://{tmp_path}/gateway") as w:
        peer = w.peer()
        welcome = await peer.hello(client="test")
        assert isinstance(welcome, Welcome)
        assert welcome.version == PROTOCOL_VERSION and welcome.model == w.model.model_info
        assert welcome.model.name == "model" and "user" in welcome.model.chat.roles
        await peer.send(Open(1, 1), Append(2, 1, (Text("Once"),)), Generate(3, 1, stream=True))
        generated = await peer.terminal(3)
        assert isinstance(generated, Generated)
        chunks = [e for e in peer.events if isinstance(e, Chunk)]
        assert "".join(e.text for e in chunks) == generated.outputs[0].text
        await peer.send(Goodbye(4))
        assert await peer.terminal(4) == Done(4)
        await until(lambda: w.model.session_count == 0)
        await peer.send(Ping(5))
        assert (await peer.terminal(0)) == welcome  # the server has forgotten it
        refused = await peer.until(lambda e: isinstance(e, Failed))
        assert isinstance(refused, Failed) and refused.op == 0 and refused.code == "protocol"


async def test_an_ephemeral_port(stories: Tokenizer) -> None:
    async with world(stories) as w:
        assert w.address.startswith("tcp://127.0.0.1:") and not w.address.endswith(":0")


async def test_address_that_cannot_be_bound(stories: Tokenizer) -> None:
    model, _ = make_model(stories, program_address="tcp://256.1.1.1:x")
    server = ProgramServer(model)
    with pytest.raises(InvalidRequest, match="cannot listen on tcp://256"):
        server.start()
    await server.stop()
    model.close()


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "protocol"),
        ([b"garbage"], "protocol"),
        ([b"\xc1"], "protocol"),
        ([b"\x91" * 100_000], "protocol"),
        ([encode([])], "protocol"),
        ([encode([Ping(1)])], "protocol"),
        ([encode([Hello(0, PROTOCOL_VERSION), Ping(1)])], "protocol"),
        ([encode([Hello(0, PROTOCOL_VERSION)]), b"more"], "protocol"),
        ([encode([Hello(0, PROTOCOL_VERSION + 1)])], "protocol"),
        ([encode([Hello(0, PROTOCOL_VERSION, api_key="wrong")])], "unauthorized"),
        ([encode([Hello(0, PROTOCOL_VERSION, api_key="wröng")])], "unauthorized"),
        ([encode([Hello(0, PROTOCOL_VERSION)])], "unauthorized"),
        ([bytes(150_000)], "invalid_request"),
    ],
)
async def test_bad_handshakes(stories: Tokenizer, frames: list[bytes], code: str) -> None:
    async with world(stories, api_key="secret", max_message_bytes=120_000) as w:
        peer = w.peer()
        await peer.raw(*frames)
        failed = await peer.terminal(0)
        assert isinstance(failed, Failed) and failed.code == code and failed.message
        assert w.model.session_count == 0
        # The same peer may try again with the key.
        await peer.send(Hello(0, PROTOCOL_VERSION, api_key="secret"))
        await peer.until(lambda e: isinstance(e, Welcome))


async def test_too_many_connections(stories: Tokenizer) -> None:
    async with world(stories, max_connections=2) as w:
        await w.ready()
        await w.ready()
        failed = await w.peer().hello()
        assert isinstance(failed, Failed) and failed.code == "overloaded"
        assert failed.message == "at most 2 clients may be connected"


async def test_malformed_messages_disturb_nobody(stories: Tokenizer) -> None:
    async with world(stories, max_message_bytes=100_000) as w:
        w.engine.paused = True
        good, bad = await w.ready(), await w.ready()
        await good.send(Open(1, 1), Append(2, 1, (Text("x"),)), Generate(3, 1))
        await good.terminal(2)
        for frames in ([b"\xff" * 10], [b""], [b"a", b"b"], [bytes(150_000)], [b"\x91\x01"]):
            bad.events.clear()
            await bad.raw(*frames)
            failed = await bad.until(lambda e: True)
            assert isinstance(failed, Failed) and failed.op == 0
        bad.events.clear()
        # A bad operation among good ones fails alone; its error has its number.
        ops = [
            {"type": "open", "op": 1, "branch": 1},
            {"type": "generate", "op": 2, "branch": 1, "params": {"temperature": -1.0}},
            {"type": "append", "op": 3, "branch": 1, "parts": []},
            {"type": "open", "op": 4, "branch": 2},
            {"type": "nonsense", "op": 5},
            {"type": "open", "op": 6, "branch": 3, "surprise": 1},
            {"type": "append", "op": True, "branch": True, "parts": []},  # no numbers
            {"type": "append", "op": msgspec.Raw(b"\xa1\xff"), "branch": 1, "parts": []},
            {"type": "ping", "op": 7},
        ]
        await bad.raw(msgspec.msgpack.encode(ops))
        assert await bad.terminal(7) == Done(7)
        assert await bad.terminal(4) == Done(4)
        failures = {e.op: e for e in bad.events if isinstance(e, Failed)}
        assert failures[0].code == "protocol"
        assert failures[2].code == "invalid_request" and "temperature" in failures[2].message
        await bad.until(lambda e: e.op == 3)
        assert {e.op: e for e in bad.events if isinstance(e, Failed)}[3].code == "cancelled"
        assert "nonsense" in failures[5].message and "surprise" in failures[6].message
        w.engine.paused = False
        w.engine._schedule()
        assert isinstance(await good.terminal(3), Generated)


async def test_what_a_frame_holds_is_bounded_before_it_is_made(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nils(count: int) -> bytes:
        return b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count

    large = encode([Hello(0, PROTOCOL_VERSION, client="x" * server_module.MAX_HELLO_BYTES)])
    async with world(stories) as w:
        stranger, known = w.peer(), await w.ready()
        known.events.clear()
        made: list[int] = []
        decode = server_module._raw_ops.decode

        class Raws:
            def decode(self, frame: bytes) -> list[msgspec.Raw]:
                made.append(len(frame))
                return decode(frame)

        monkeypatch.setattr(server_module, "_raw_ops", Raws())
        many = nils(server_module.MAX_OPS + 1)
        for peer, frame, said in (
            (stranger, many, "exactly one hello"),
            (stranger, large, "exactly one hello"),
            (known, many, f"{server_module.MAX_OPS + 1} operations; at most"),
        ):
            await peer.raw(frame)
            failed = await peer.until(lambda e: True)
            assert isinstance(failed, Failed) and said in failed.message
            peer.events.clear()
        assert not made
        # Large frames, and frames with something malformed, are decoded operation by operation.
        monkeypatch.setattr(server_module, "LARGE_BYTES", 10)
        long = Text("x" * 100)
        await known.send(Open(1, 1), Append(2, 1, (long,)), Append(3, 9, (long,)), Ping(4))
        assert await known.terminal(2) == Done(2) and await known.terminal(4) == Done(4)
        assert isinstance(await known.terminal(3), Failed) and len(made) == 1


async def test_programs_without_a_key_share_by_their_address(
    stories: Tokenizer, tmp_path: Path
) -> None:
    for address, sources in (("tcp://127.0.0.1:0", 1), (f"ipc://{tmp_path}/x", 2)):
        async with world(stories, program_address=address) as w:
            for _ in range(2):
                peer = await w.ready()
                await peer.send(Open(1, 1), Append(2, 1, (Text("x"),)), Generate(3, 1))
                await peer.terminal(3)
            clients = {request.client for request in w.engine.submitted}
            assert len(clients) == sources


async def test_a_frame_of_many_operations_leaves_others_their_turn(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SLICE_SECONDS", 0.0)
    async with world(stories) as here:
        peer = await here.ready()
        seen: set[int] = set()

        async def watch() -> None:
            while True:
                seen.add(here.model.branch_count)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        opens: list[Any] = [Open(op, op) for op in range(1, 201)]
        # The next frame waits its turn, and a malformed operation keeps its place.
        await peer.socket.send(msgspec.msgpack.encode([*opens, {"type": "open", "op": 201}]))
        await peer.send(Append(202, 7, (Text("behind"),)), Ping(203))
        await peer.terminal(203)
        watching.cancel()
        assert len(seen) > 150
        assert [event.op for event in peer.events[1:]] == list(range(1, 204))
        assert isinstance(peer.events[201], Failed)

        seen.clear()
        monkeypatch.setattr(server_module, "MAX_WAITING_BYTES", 1000)
        watching = asyncio.create_task(watch())
        await peer.send(*(Open(300 + op, 300 + op) for op in range(200)))
        await peer.terminal(499)
        watching.cancel()
        assert len(seen) < 20, "so large a frame does not wait"


async def test_what_a_client_asked_for_ends_with_it(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SLICE_SECONDS", 0.0)
    async with world(stories) as here:
        peer = await here.ready()
        await peer.send(Open(1, 1), Goodbye(2), *(Open(op, op) for op in range(3, 100)))
        await peer.terminal(2)
        await until(lambda: not here.model.session_count)
        assert here.model.branch_count == 0
        assert [event.op for event in peer.events[1:]] == [1, 2]

        other = await here.ready()
        await other.send(*(Open(op, op) for op in range(1, 1000)))
        await until(lambda: here.model.branch_count > 5)
        assert here.model.branch_count < 999
        (connection,) = here.server._connections.values()
        here.server._drop(connection, "a test")
        await asyncio.sleep(0.01)
        assert here.model.branch_count == 0 and not connection.waiting


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_an_ipv6_address(stories: Tokenizer) -> None:
    async with world(stories, program_address="tcp://[::1]:0") as w:
        assert w.address.startswith("tcp://[::1]:")
        connection = await asyncio.to_thread(Connection, w.address)
        assert connection.model == w.model.model_info
        await asyncio.to_thread(connection.close)


async def test_a_client_that_disappears_is_freed(stories: Tokenizer) -> None:
    async with world(stories) as w:
        w.engine.paused = True
        peer = await w.ready()
        await peer.send(Open(1, 1, program="p"), Append(2, 1, (Text("x"),)), Generate(3, 1))
        await until(lambda: bool(w.engine.running))
        peer.socket.close()
        await until(lambda: not w.engine.running)
        assert w.model.session_count == 0 and w.model.branch_count == 0 and w.engine.released


async def test_a_silent_client_is_freed(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.01)
    async with world(stories, client_timeout=0.2) as w:
        silent, talking = await w.ready(), await w.ready()
        await silent.send(Open(1, 1))
        await silent.terminal(1)
        pings = itertools.count(1)
        while w.model.session_count == 2:
            ping = next(pings)
            await talking.send(Ping(ping))
            await talking.terminal(ping)
        assert w.model.session_count == 1 and w.model.branch_count == 0
        told = await silent.until(lambda e: e.op == 0 and isinstance(e, Failed))
        assert told.code == "unavailable" and "silent" in told.message
        ping = next(pings)
        await talking.send(Ping(ping))
        await talking.terminal(ping)


async def test_those_who_wait_hear_something(stories: Tokenizer) -> None:
    async with world(stories) as w:
        w.engine.paused = True
        peer = await w.ready()
        await peer.send(Open(1, 1), Append(2, 1, (Text("x"),)), Generate(3, 1))
        await peer.terminal(2)
        assert decode_events(await soon(peer.socket.recv())) == []


async def test_a_client_that_does_not_read(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow client blocks no other, catches up if it reads in time, and is dropped otherwise."""
    monkeypatch.setattr(programs, "SEND_HWM", 2)
    monkeypatch.setattr(server_module, "MAX_BACKLOG_BYTES", 3_000_000)
    async with world(stories) as w:
        w.engine.script = lambda m: [300] * 400
        slow = await w.ready(RCVHWM=2, RCVBUF=4096)
        other = await w.ready()
        params = SamplingParams(max_tokens=400, logprobs=True)
        connection = next(iter(w.server._connections.values()))
        op = 1
        while not connection.backlog:
            await slow.send(Open(op, op), Generate(op + 1, op, params=params, stream=True))
            await other.send(Ping(op))
            assert await other.terminal(op) == Done(op)
            # One after the other: answers of many together may exceed the client's backlog.
            submitted = op // 2 + 1
            await until(lambda: len(w.engine.submitted) == submitted and not w.engine.running)  # noqa: B023
            op += 2
        assert isinstance(await slow.terminal(op - 1), Generated)
        await until(lambda: not connection.backlog)
        while w.model.session_count == 2:
            await slow.send(Open(op, op), Generate(op + 1, op, params=params, stream=True))
            await other.send(Ping(op))
            assert await other.terminal(op) == Done(op)
            assert connection.backlog_bytes < 4_000_000
            op += 2
        assert connection.identity not in w.server._connections


async def test_a_drain_lets_programs_end(stories: Tokenizer) -> None:
    async with world(stories) as w:
        w.engine.paused = True
        peer, idle = await w.ready(), await w.ready()
        await peer.send(Open(1, 1), Append(2, 1, (Text("x"),)), Generate(3, 1))
        await until(lambda: bool(w.engine.running))
        assert w.server.busy
        draining = asyncio.create_task(
            w.model.drain.run(lambda: w.server.busy, 1e9, asyncio.Event())
        )
        await until(lambda: w.model.drain.begun)
        # Its branches may fork; new root branches and new clients are refused.
        await peer.send(Open(4, 2, parent=1), Close(5, 2))
        await idle.send(Open(1, 1), Close(2, 1))
        refused = [await idle.terminal(1), await w.peer().hello()]
        assert all(isinstance(one, Failed) and one.code == "unavailable" for one in refused)
        assert not draining.done()
        w.engine.paused = False
        w.engine._schedule()
        assert isinstance(await peer.terminal(3), Generated)
        assert await peer.terminal(4) == Done(4)
        await peer.send(Close(6, 1))
        await peer.terminal(6)
        await soon(draining)


async def test_programs_have_keys_and_quotas_too(stories: Tokenizer, tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    key, entry = new_key("a", requests_per_minute=1)
    write_keys(path, [entry])
    async with world(stories, keys_file=path) as w:
        refused = await w.peer().hello(api_key=key[:-1] + "x")
        assert isinstance(refused, Failed) and refused.code == "unauthorized"
        peer = w.peer()
        assert isinstance(await peer.hello(api_key=key), Welcome)
        await peer.send(Open(1, 1, namespace="s"), Append(2, 1, (Text("x"),)), Generate(3, 1))
        assert isinstance(await peer.terminal(3), Generated)
        assert w.engine.submitted[-1].namespace == "@a/s"
        await peer.send(Open(10, 3), Append(11, 3, (Text("x"),)), Prefill(12, 3), Close(13, 3))
        refused = await peer.terminal(12)
        assert isinstance(refused, Failed) and refused.code == "quota_exceeded"
        await peer.send(Generate(4, 1), Generate(5, 1), Close(6, 1))
        refused = await peer.terminal(4)
        assert isinstance(refused, Failed) and refused.code == "quota_exceeded"
        assert "'a' has used its 1 requests per minute" in refused.message
        assert isinstance(await peer.terminal(6), Done)
        write_keys(path, [])
        await peer.send(Open(7, 2), Append(8, 2, (Text("x"),)), Generate(9, 2))
        refused = await peer.terminal(9)
        assert isinstance(refused, Failed) and refused.code == "unauthorized"
