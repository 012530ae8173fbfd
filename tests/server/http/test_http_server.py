"""Behaviour of all endpoints: keys, health, bounds, disconnects, information."""

import asyncio
import contextlib
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client.parser import text_string_to_metric_families

from rootlace.runtime.processes import JsonFormatter
from rootlace.runtime.server.generate import observe
from rootlace.runtime.server.http import admin, generation
from rootlace.runtime.server.http.app import make_runner
from rootlace.runtime.server.http.errors import reply_to
from rootlace.runtime.server.served_model import INLINE_CHARACTERS
from rootlace.runtime.server.server_state import Drain
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.protocol import Timing
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import PAUSE, FakeChat, FakeModel
from tests.waiting import skip, soon, until


async def test_health_follows_the_engine(served: Served) -> None:
    assert (await served.get("/health")).status == 200
    served.model.healthy = False
    async with served.http.get("/health") as reply:
        assert reply.status == 503
        assert (await reply.json())["error"]["code"] == "unavailable"


async def test_api_key(serve: Serve) -> None:
    served = await serve(FakeModel(api_key="secret"))
    assert len((await served.openai().models.list()).data) == 1
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer "},
        {"Authorization": "secret"},
    ):
        for path in ("/v1/models", "/get_model_info", "/no/such/path", "/flush_cache"):
            async with served.http.get(path, headers=headers) as reply:
                assert reply.status == 401
                assert (await reply.json())["error"]["code"] == "unauthorized"
        assert (await served.get("/health", headers=headers)).status == 200
    with pytest.raises(openai.AuthenticationError):
        await served.openai(api_key="no").completions.create(model="fake", prompt="x")
    assert not served.model.sessions and not served.model.flushed


async def test_body_bound(serve: Serve) -> None:
    served = await serve(FakeModel(max_body_bytes=10_000))
    async with served.http.post("/generate", json={"text": "x" * 20_000}) as reply:
        assert reply.status == 413
        assert "--max-body" in (await reply.json())["error"]["message"]
    async with served.http.post("/v1/messages", json={"text": "x" * 20_000}) as reply:
        assert (await reply.json())["error"]["type"] == "request_too_large"
    assert (await served.post("/generate", {"text": "x" * 5_000})).status == 200


async def test_a_body_that_is_not_encoded_as_it_says(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    for _ in range(2):
        async with served.http.post("/generate", data=b'{"text": "a"}', headers=headers) as reply:
            assert reply.status == 400
            assert "the body cannot be read" in (await reply.json())["error"]["message"]
    assert not caplog.records  # the client's fault is not logged


async def test_unknown_paths_and_methods(served: Served) -> None:
    async with served.http.get("/v2/nothing") as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["type"]) == (404, "not_found_error")
        assert "/v1/models/{name}," in error["message"]
    async with served.http.get("/generate") as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")
        assert "error" in await reply.json()


async def test_an_unknown_path_is_told_the_known_ones(served: Served) -> None:
    message = (await served.post("/v1/chat/completion", {})).json()["error"]["message"]
    assert "Did you mean /v1/chat/completions" in message
    assert "/tokenizer_info" in message and "/v1/models" in message


async def test_the_id_of_a_request_comes_back(served: Served) -> None:
    for path, status in (("/health", 200), ("/nowhere", 404)):
        async with served.http.get(path, headers={"X-Request-Id": "a-1"}) as reply:
            assert (reply.status, reply.headers["X-Request-Id"]) == (status, "a-1")
    ids = set()
    for headers in ({}, {"X-Request-Id": "forged line"}):
        ids.add((await served.get("/health", headers=headers)).headers["X-Request-Id"])
    assert len(ids) == 2 and "forged line" not in ids
    body = {"text": "a", "stream": True}
    async with served.http.post("/generate", json=body, headers={"X-Request-Id": "s"}) as reply:
        assert reply.headers["X-Request-Id"] == "s"


async def test_an_unforeseen_fault_is_one_requests_problem(served: Served) -> None:
    def broken(prompt: str, index: int) -> str:
        raise ZeroDivisionError

    served.model.chat.render = broken  # type: ignore[method-assign, assignment]
    body = {"messages": [{"role": "user", "content": "x"}]}
    async with served.http.post("/v1/chat/completions", json=body) as reply:
        assert (reply.status, (await reply.json())["error"]["message"]) == (500, "internal error")
    assert (await served.post("/generate", {"text": "x"})).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_timeout_ends_the_request(served: Served, path: str) -> None:
    served.model.script = lambda prompt, index: "he" + PAUSE
    body = {"text" if path == "/generate" else "prompt": "a", "timeout": 20}
    asked = asyncio.create_task(served.http.post(path, json=body))
    await until(lambda: bool(served.model.sessions))
    skip(20)
    async with await asked as reply:
        assert reply.status == 408
        error = (await reply.json())["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert "of 20 s" in error["message"]
    assert served.model.sessions[-1].closed
    async with served.http.post(path, json={**body, "timeout": 0}) as reply:
        assert reply.status == 400 and (await reply.json())["error"]["param"] == "timeout"
    served.model.script = lambda prompt, index: "done"
    assert (await served.post(path, {**body, "timeout": 3600})).status == 200


async def test_a_timeout_in_a_stream_is_its_last_event(served: Served) -> None:
    served.model.script = lambda prompt, index: "he" + PAUSE
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ):
        async with served.http.post(path, json={**body, "stream": True, "timeout": 20}) as reply:
            text = ""
            while '"h' not in text:
                text += (await reply.content.readline()).decode()
            skip(20)
            text += await reply.text()
        assert reply.status == 200 and "its timeout of 20 s" in text
        assert served.model.sessions[-1].closed


async def test_tokenizer_info(served: Served) -> None:
    async with served.http.get("/tokenizer_info") as reply:
        assert await reply.json() == {"eos_token": "</s>", "chat_template": FakeChat.source}


async def test_information(served: Served) -> None:
    info = (await served.get("/get_model_info")).json()
    assert info["model_path"] == info["tokenizer_path"] == "/models/fake"
    assert info["is_generation"] is True
    assert (info["context_length"], info["program_address"]) == (1000, "tcp://127.0.0.1:1")
    info = (await served.get("/get_server_info")).json()
    assert info["status"] == {"running": 0, "blocks_total": 10} and info["version"]
    assert info["max_total_num_tokens"] == 160 and info["disable_radix_cache"] is False
    assert (await served.get("/server_info")).json() == info


async def test_flush_cache(served: Served) -> None:
    async with served.http.get("/flush_cache") as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")
        assert "use POST" in (await reply.json())["error"]["message"]
    assert not served.model.flushed
    assert (await served.post("/flush_cache")).status == 200
    assert served.model.flushed == 1


async def test_health_generate(served: Served) -> None:
    assert (await served.get("/health_generate")).status == 200
    assert served.model.last_generate.params.max_tokens == 1


async def test_ready_is_of_the_model_that_is_asked_for(served: Served) -> None:
    for model, status in (("fake", 200), ("default", 200), ("zzz", 404)):
        async with served.http.get("/ready", params={"model": model}) as reply:
            assert reply.status == status
            assert status == 200 or "'fake'" in (await reply.json())["error"]["message"]


async def test_ready_tells_of_a_disk_that_is_not_written_to(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = await served.model.status()

    async def ready(**disk: int) -> dict[str, Any]:
        async def told(account: object = None) -> dict[str, Any]:
            return {**status, **disk}

        monkeypatch.setattr(served.model, "status", told)
        monkeypatch.setattr(admin, "LOOK_SECONDS", 60.0)
        async with served.http.get("/ready") as reply:
            assert reply.status == 200
            return await reply.json()

    assert await ready(disk_failed=0, disk_full=0) == {"status": "ready"}
    (said,) = (await ready(disk_failed=0, disk_full=1))["degraded"]
    assert "--cache-disk is full" in said
    # An engine whose disk could not be opened has no other counters of the disk.
    (said,) = (await ready(disk_failed=1, disk_working=0))["degraded"]
    assert "failed" in said
    # One of two replicas has failed; their counters are added.
    (said,) = (await ready(disk_failed=1, disk_working=1, disk_full=0))["degraded"]
    assert "failed" in said


async def test_ready_follows_tokens(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served.http.get("/ready") as reply:  # no token yet: the probe makes one
        assert reply.status == 200
    assert len(served.model.sessions) == 1
    served.model.last_token = time.monotonic()
    assert (await served.get("/ready")).status == 200
    assert len(served.model.sessions) == 1  # a recent token of any request is enough
    served.model.last_token = -math.inf
    served.model.script = lambda prompt, index: PAUSE  # the engine hangs
    monkeypatch.setattr(admin, "READY_SECONDS", 0.01)
    for _ in range(2):
        async with served.http.get("/ready") as reply:
            assert reply.status == 503
            assert "no token went through" in await reply.text()
    assert len(served.model.sessions) == 2  # both clients waited for one probe


async def test_metrics(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    observe(served.model.metrics, Timing(queued=0.1, first_token=0.2, total=1.2), tokens=11)
    for path in ("/health", "/nowhere", "/elsewhere"):
        async with served.http.get(path):
            pass

    async def values() -> dict[str, float]:
        async with served.http.get("/metrics") as reply:
            assert reply.content_type == "text/plain"
            families = text_string_to_metric_families(await reply.text())
        return {
            s.name + "".join(f",{v}" for v in s.labels.values()): s.value
            for family in families
            for s in family.samples
            if not s.name.endswith("_bucket")
        }

    found = await values()
    assert found["rootlace_time_to_first_token_seconds_sum"] == 0.2
    assert found["rootlace_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert found["rootlace_queue_duration_seconds_sum"] == 0.1
    assert found["rootlace_request_duration_seconds_count"] == 1
    assert found["rootlace_http_requests_total,/health,200"] == 1
    assert found["rootlace_http_requests_total,,404"] == 2
    assert (found["rootlace_up"], found["rootlace_running"]) == (1, 0)

    async def gone() -> dict[str, Any]:
        raise ServerUnavailable("gone")

    monkeypatch.setattr(served.model, "status", gone)
    assert (await values())["rootlace_up"] == 0


async def test_tokenize_and_back(served: Served) -> None:
    found = (await served.post("/tokenize", {"prompt": "hé"})).json()
    assert found["tokens"] == [256, *"hé".encode()] and found["count"] == 4
    assert (found["max_model_len"], found["token_strs"]) == (1000, None)
    async with served.http.post("/detokenize", json={"tokens": found["tokens"]}) as reply:
        assert await reply.json() == {"prompt": "hé"}
    plain = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    found = (await served.post("/tokenize", plain)).json()
    assert (found["tokens"], found["token_strs"]) == ([104, 105], ["h", "i"])
    chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert (await served.post("/tokenize", chat)).json()["tokens"] == list(b"<user>x")
    assert (await served.post("/detokenize", {"tokens": [70000]})).status == 400
    long = {"prompt": "a" * (4 * 2**20 + 1)}
    async with served.http.post("/tokenize", json=long) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "prompt"
    assert (await served.post("/tokenize", {"prompt": 3})).json()["error"]["param"] == "prompt"


async def test_stopping_ends_streams(serve: Serve) -> None:
    """A server that stops cancels what it still streams, and does not wait for it."""
    model = FakeModel()
    model.script = lambda prompt, index: "he" + PAUSE
    runner = make_runner(model)  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client,
        client.post("/generate", json={"text": "a", "stream": True}) as reply,
    ):
        await reply.content.readuntil(b"\n\n")
        await soon(runner.cleanup())
    assert model.sessions[0].closed


async def test_text_that_is_not_unicode(served: Served) -> None:
    for body in (b'{"text": "\\ud800"}', b'{"text": "\xff"}', b'{"text": "\x00"}'):
        assert (await served.post("/generate", data=body)).status == 400, body


def test_every_path_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text()
    app = make_runner(FakeModel()).app  # type: ignore[arg-type]
    for resource in app.router.resources():
        path = resource.canonical.replace("{name}", "{id}")
        assert f"{path}`" in page, f"docs/http.md does not name {path}"


async def test_a_drain(serve: Serve) -> None:
    """A server that is told to stop finishes running requests and refuses new ones."""
    model = FakeModel()
    served = await serve(model)
    model.script = lambda prompt, index: "he" + PAUSE
    stop = asyncio.Event()
    async with served.http.post("/generate", json={"text": "a", "stream": True}) as reply:
        await reply.content.readuntil(b"\n\n")
        draining = asyncio.create_task(model.drain.run(lambda: False, 1e9, stop))
        await until(lambda: model.drain.begun)
        for path, method in (("/generate", "POST"), ("/ready", "GET"), ("/health_generate", "GET")):
            async with served.http.request(method, path, json={"text": "b"}) as refused:
                assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
                assert "stopping" in (await refused.json())["error"]["message"]
        for path in ("/health", "/metrics"):
            assert (await served.get(path)).status == 200
        assert (await served.post("/abort", {"rid": "another"})).json()["aborted"] == 0
        assert len(model.sessions) == 1 and not model.sessions[0].closed
        assert not draining.done()
    await soon(draining)  # its last client has left
    assert model.sessions[0].closed


@pytest.mark.parametrize("seconds, stopped", [(0.0, False), (1e9, True)])
async def test_the_end_of_a_drain(seconds: float, stopped: bool) -> None:
    """A drain waits for busy clients, until its time is over or the server must stop now."""
    drain, stop, busy = Drain(), asyncio.Event(), [True]
    if stopped:
        stop.set()
    with drain.request():
        await soon(drain.run(lambda: True, seconds, stop))
    waiting = asyncio.create_task(drain.run(lambda: busy[0], 1e9, asyncio.Event()))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    busy[0] = False
    await soon(waiting)


async def test_logs_for_programs(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is a JSON object; those of a request have its id, and none has its text."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(JsonFormatter("gateway"))
    key = {"X-Request-Id": "r-1", "Authorization": "Bearer SECRET"}
    monkeypatch.setattr(generation, "OpenSequences", broken)
    body = {"text": "SECRET"}
    assert (await served.post("/generate?key=SECRET", body, headers=key)).status == 500
    await until(lambda: len(caplog.records) == 2)
    fault, access = map(json.loads, caplog.text.splitlines())
    assert "SECRET" not in caplog.text
    assert fault["request_id"] == access["request_id"] == "r-1"
    assert (fault["level"], fault["process"]) == ("error", "gateway")
    assert "ZeroDivisionError" in fault["exception"]
    assert (access["method"], access["path"], access["status"]) == ("POST", "/generate", 500)
    assert access["seconds"] >= 0 and access["bytes"] > 0


async def test_long_conversations_are_written_elsewhere_and_too_long_ones_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: list[int] = []
    there = served.model.tokenize

    async def tokenize(cost: int, *args: Any, **kwargs: Any) -> Any:
        costs.append(cost)
        return await there(cost, *args, **kwargs)

    monkeypatch.setattr(served.model, "tokenize", tokenize)
    for count, status in ((3, 200), (2000, 200), (2**14 + 1, 400)):
        body = {"messages": [{"role": "user", "content": "a"}] * count}
        assert (await served.post("/v1/chat/completions", body)).status == status
    short, long = costs
    assert short < INLINE_CHARACTERS < long
    for path, body, param in (
        ("/tokenize", {"prompt": "a" * (2**20 + 1)}, "prompt"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "tokens"),
    ):
        async with served.http.post(path, json=body) as reply:
            assert reply.status == 400 and (await reply.json())["error"]["param"] == param


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-Slow: ", b"POST body"])
async def test_who_sends_too_slowly_is_let_go(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    which = "body.BODY_SECONDS" if sent == b"POST body" else "app.IDLE_SECONDS"
    monkeypatch.setattr(f"rootlace.runtime.server.http.{which}", 0.05)
    served = await serve(FakeModel())
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    if sent == b"POST body":
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        sent = head + b"\r\nContent-Length: 9\r\n\r\n{"
    writer.write(sent)
    said = await soon(reader.readline())
    assert said == (b"HTTP/1.1 408 Request Timeout\r\n" if sent.startswith(b"POST") else b"")
    writer.close()

    async def answered() -> None:
        """A new connection also has a bound on the time until its first request."""
        while True:
            with contextlib.suppress(aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                assert (await served.get("/health")).status == 200
                return

    await soon(answered())


async def test_a_client_that_is_gone_is_no_fault_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = ConnectionResetError("Cannot write to closing transport")
    reply = reply_to(make_mocked_request("GET", "/v1/models"), gone)
    assert reply.status == 499 and not caplog.records
