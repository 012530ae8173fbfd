"""Streams: pieces that bypass the answering task, and pieces that cannot."""

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from aiohttp.http_writer import StreamWriter

from rootlace.runtime.server.http import app, openai_completions
from rootlace.runtime.server.http.replies import DirectEvents
from rootlace.runtime.server.served_model import Deliveries
from rootlace.wire.errors import ServerUnavailable
from tests.server.http.conftest import Served

PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


async def _ask(
    served: Served, path: str, version: str = "1.1", **more: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and ask for a stream; the connection reads ahead little."""
    place = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**12)
    body = json.dumps({**PATHS[path], "stream": True, **more}).encode()
    writer.write(
        f"POST {path} HTTP/{version}\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return reader, writer


async def _events(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    """Return the events until the end of the stream, which must be proper."""
    raw = await reader.read()
    head, _, rest = raw.partition(b"\r\n\r\n")
    data = rest
    if b"chunked" in head:
        data, size = b"", -1
        while size:
            length, _, rest = rest.partition(b"\r\n")
            size = int(length, 16)
            data, rest = data + rest[:size], rest[size + 2 :]
        assert not rest
    *events, done, empty = data.split(b"\n\n")
    assert done == b"data: [DONE]" and not empty
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def _texts(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the text of each choice, joined from its events."""
    found: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_both_ways_say_the_same(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    version: str,
) -> None:
    """Chunks take the short path; the events equal those of the long path."""
    told = {0: 'he said "\u00fc\\ \u2028"', 1: "and more"}
    served.model.script = lambda prompt, index: told[index]
    direct = 0
    write = DirectEvents.write

    def counted(self: DirectEvents, data: bytes) -> None:
        nonlocal direct
        direct += 1
        write(self, data)

    monkeypatch.setattr(DirectEvents, "write", counted)
    caplog.set_level("INFO", logger=app.__name__)
    reader, writer = await _ask(served, path, version, n=2, max_tokens=64)
    events = await _events(reader)
    writer.close()
    (logged,) = [record for record in caplog.records if record.name == app.__name__]
    sent = sum(
        len(json.dumps(event, separators=(",", ":"), ensure_ascii=False)) for event in events
    )
    assert vars(logged)["fields"]["bytes"] > sent
    assert _texts(events) == told
    assert (direct > 0) == (version == "1.1")
    monkeypatch.setattr(DirectEvents, "begin", lambda self, writer: None)
    reader, writer = await _ask(served, path, version, n=2, max_tokens=64)
    others = await _events(reader)
    writer.close()
    for event in (*events, *others):
        del event["id"], event["created"]
    # Pieces of different samples may come in another order.
    assert sorted(map(json.dumps, events)) == sorted(map(json.dumps, others))


_CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
STREAMS: dict[str, dict[str, Any]] = {
    **PATHS,
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**_CHAT, "max_tokens": 64},
    "/generate": {"text": "a"},
    "/api/chat": _CHAT,
    "/api/generate": {"model": "fake", "prompt": "a"},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_readers_by_line_find_whole_events(served: Served, path: str) -> None:
    """Events contain no line end of `str.splitlines`, which httpx's `iter_lines` and so Ollama's
    client use."""
    served.model.script = lambda prompt, index: "a\u2028b\x85c\u2029d"
    reply = await served.post(path, {**STREAMS[path], "stream": True})
    assert reply.status == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert all(line.startswith(("{", "event: ", "[DONE]")) for line in lines)
    events = json.dumps([json.loads(line) for line in lines if line.startswith("{")])
    assert all(escape in events for escape in (r"\u2028", r"\u0085", r"\u2029"))


class _Transport(asyncio.WriteTransport):
    """Socket that takes nothing once it is `full`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.full = self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return int(self.full)


async def test_pieces_of_a_turn_leave_together() -> None:
    """Sends follow the making of all events; the way is shut while the client reads too slowly."""
    deliveries, ways = Deliveries(), []
    for _ in range(2):
        protocol = cast(Any, SimpleNamespace(transport=_Transport(), writing_paused=False))
        writer = StreamWriter(protocol, asyncio.get_running_loop())
        writer.enable_chunking()
        direct = DirectEvents(deliveries)
        direct.begin(writer)
        ways.append((direct, protocol.transport, writer))
    (first, pipe, told), (second, other, _) = ways
    first.write(b"a")
    second.write(b"b")
    first.write(b"c")
    assert pipe.sent == other.sent == []
    await asyncio.sleep(0)
    assert (pipe.sent, other.sent) == ([b"2\r\nac\r\n"], [b"1\r\nb\r\n"])
    pipe.full = told.protocol.writing_paused = True
    first.write(b"d")
    first.flush()
    assert pipe.sent[1:] == [b"1\r\nd\r\n"] and not first.open and second.open
    first.resume()
    assert not first.open
    pipe.full = told.protocol.writing_paused = False
    first.resume()
    assert first.open
    first.write(b"e")
    first.end()
    await asyncio.sleep(0)
    assert pipe.sent[2:] == [b"1\r\ne\r\n"] and told.output_size == sum(map(len, pipe.sent))
    assert not first.open
    second.write(b"f")
    other.closed = True
    await asyncio.sleep(0)
    assert not second.open


async def test_a_client_that_reads_slowly_misses_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [f"{number:06}" * 2**12 for number in range(40)]
    served.model.script = lambda prompt, index: pieces  # type: ignore[assignment,return-value]
    ways = []
    begin, flush, resume = DirectEvents.begin, DirectEvents.flush, DirectEvents.resume

    def with_small_buffer(self: DirectEvents, writer: Any) -> None:
        connection = writer.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        begin(self, writer)

    def flushed(self: DirectEvents) -> None:
        flush(self)
        ways.append(self.open)

    def resumed(self: DirectEvents) -> None:
        resume(self)
        ways.append(self.open)

    monkeypatch.setattr(DirectEvents, "begin", with_small_buffer)
    monkeypatch.setattr(DirectEvents, "flush", flushed)
    monkeypatch.setattr(DirectEvents, "resume", resumed)
    reader, writer = await _ask(served, "/v1/completions", max_tokens=2**24)
    while served.model.generated != len(pieces):
        await asyncio.sleep(0)
    assert _texts(await _events(reader)) == {0: "".join(pieces)}
    assert True in ways and False in ways
    writer.close()


async def test_a_fault_on_the_short_way_ends_the_stream_with_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fail(text: str) -> bytes:
        said.append(text)
        if len(said) > 1:  # the first one begins the reply
            raise RuntimeError("of the test")
        return json.dumps(text).encode()

    monkeypatch.setattr(openai_completions, "_encode_text", fail)
    reader, writer = await _ask(served, "/v1/chat/completions")
    *_, last = await _events(reader)
    writer.close()
    assert last["error"]["message"] == "internal error"


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "stream": True}
INTERFACES = {
    "/v1/completions": ({"prompt": "a", "stream": True}, ("error", "message")),
    "/v1/chat/completions": (CHAT, ("error", "message")),
    "/v1/messages": ({**CHAT, "max_tokens": 9}, ("error", "message")),
    "/v1/responses": ({"input": "a", "stream": True}, ("response", "error", "message")),
    "/generate": ({"text": "a", "stream": True}, ("error", "message")),
    "/api/generate": ({"model": "fake", "prompt": "a"}, ("error",)),
    "/api/chat": (CHAT, ("error",)),
}


@pytest.mark.parametrize("path", INTERFACES)
async def test_a_stream_whose_engine_is_gone_ends_with_an_error_of_its_interface(
    served: Served, path: str
) -> None:
    def script(prompt: str, index: int) -> Any:
        yield "h"
        raise ServerUnavailable("the engine died 4 times")

    served.model.script = script
    body, place = INTERFACES[path]
    async with served.http.post(path, json=body) as reply:
        assert reply.status == 200
        lines = (await reply.text()).splitlines()
    payloads = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    assert len(payloads) > 1
    last = json.loads(payloads[-1])
    kind = {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path)
    assert last.get("type") == kind and (kind is None or f"event: {kind}" in lines)
    for key in place:
        last = last[key]
    assert last == "the engine died 4 times"
