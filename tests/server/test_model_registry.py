"""Several models behind one gateway: who answers, which are loaded, and what a crash disturbs."""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web

import rootlace as rl
from rootlace.runtime.config import EngineConfig, GatewayConfig, RuntimeConfig
from rootlace.runtime.server import model_registry as module
from rootlace.runtime.server.auth import new_key, write_keys
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.http.model_routes import runner_for
from rootlace.runtime.server.http.ollama_models import NEVER
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.programs import ProgramServer
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import ServerState
from rootlace.wire.errors import ModelNotFound, UnsupportedModel
from rootlace.wire.protocol import (
    PROTOCOL_VERSION,
    Failed,
    Hello,
    Welcome,
    decode_events,
    encode,
)
from tests.server.conftest import load
from tests.server.fake_engine import FakeEngine
from tests.waiting import soon, until


@dataclass
class Place:
    """A server with models `a` (with an adapter) and `b`, over made-up engines."""

    registry: ModelRegistry
    http: aiohttp.ClientSession
    programs: ProgramServer
    runner: web.AppRunner
    loaded: list[str]
    engines: dict[str, FakeEngine]
    exits: dict[str, Callable[[str], None]]
    broken: set[str] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Models are loaded while it is set."""

    async def ask(
        self, path: str, body: dict[str, Any] | None = None, key: str = ""
    ) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.http.request(method, path, json=body, headers=headers) as reply:
            one = reply.content_type == "application/json"
            found = await (reply.json() if one else reply.text())
            return reply.status, found


Make = Callable[..., Any]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Make]:
    places: list[Place] = []

    async def start(**options: Any) -> Place:
        loaded: list[str] = []
        engines: dict[str, FakeEngine] = {}
        exits: dict[str, Callable[[str], None]] = {}
        tokenizer = load("stories3M")

        async def open_model(
            config: GatewayConfig,
            engine_config: EngineConfig,
            on_exit: Callable[[str], None],
            server_state: ServerState,
        ) -> ServedModel:
            name = config.served_name
            loaded.append(name)
            await place.gate.wait()
            if name in place.broken:
                raise UnsupportedModel(f"/m/{name}/config.json: it is gone")
            engine = engines[name] = FakeEngine(tokenizer.vocab_size)
            engine.adapters = ("x",) if name == "a" else ()
            exits[name] = on_exit
            return ServedModel(config, engine, tokenizer, ChatTemplate(None), (), server_state)

        monkeypatch.setattr(module, "open_model", open_model)
        address = f"ipc://{tmp_path}/programs"
        registry = ModelRegistry(
            [
                RuntimeConfig(
                    GatewayConfig(
                        model=f"/m/{name}", served_name=name, program_address=address, **options
                    )
                )
                for name in ("a", "b")
            ]
        )
        programs, runner = ProgramServer(registry), runner_for(registry)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        http = aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}")
        place = Place(registry, http, programs, runner, loaded, engines, exits)
        place.gate.set()
        places.append(place)
        await registry.start()
        registry.server_state.program_address = programs.start()
        return place

    yield start
    for place in places:
        await place.http.close()
        await place.runner.cleanup()
        await place.programs.stop()
        await place.registry.stop()


async def test_the_field_model_chooses(make: Make) -> None:
    place = await make()
    assert place.loaded == ["a", "b"]
    body = {"prompt": "hi", "max_tokens": 2}
    for asked, answers in (
        (None, "a"),
        ("b", "b"),
        ("a:x", "a:x"),
        ("/m/b", "b"),
    ):
        given = {**body, "model": asked} if asked else body
        status, reply = await place.ask("/v1/completions", given)
        assert (status, reply["model"]) == (200, answers)
    assert [len(place.engines[name].submitted) for name in "ab"] == [2, 2]
    assert place.engines["a"].submitted[-1].adapter == "x"
    status, error = await place.ask("/v1/completions", {**body, "model": "c"})
    assert status == 404 and "'a', 'b'" in error["error"]["message"]
    status, error = await place.ask("/v1/completions", {**body, "model": "b:x"})
    assert status == 404

    _, models = await place.ask("/v1/models")
    assert [one["id"] for one in models["data"]] == ["a", "a:x", "b"]
    assert (await place.ask("/v1/models/b"))[1]["root"] == "/m/b"
    assert [m["name"] for m in (await place.ask("/api/tags"))[1]["models"]] == ["a", "a:x", "b"]
    counted = await place.ask("/v1/responses/input_tokens", {"input": "hi", "model": "b"})
    assert counted[0] == 200 and counted[1]["input_tokens"] > 0
    for path in ("/cache/tree", "/cache/pins", "/get_server_info", "/ready", "/health"):
        assert (await place.ask(f"{path}?model=b"))[0] == 200, path
    assert (await place.ask("/cache/tree?model=c"))[0] == 404
    for path in ("/get_model_info", "/get_server_info", "/get_model_info?model=b"):
        told = (await place.ask(path))[1]["program_address"]
        assert told == place.registry.server_state.program_address is not None, path
    _, metrics = await place.ask("/metrics")
    for line in (
        'rootlace_up{model="a"} 1.0',
        'rootlace_request_duration_seconds_count{model="b"} 2',
    ):
        assert line in metrics
    assert metrics.count("# TYPE rootlace_up gauge") == 1
    assert 'rootlace_http_requests_total{path="/v1/models",status="200"} 1.0' in metrics


async def test_ready_tells_what_is_degraded_of_any_model(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await make()
    model = place.registry.slot("b").model
    status = await model.status()

    async def told(account: object = None) -> dict[str, Any]:
        return {**status, "disk_failed": 1, "disk_working": 0}

    monkeypatch.setattr(model, "status", told)
    for path, degraded in (("/ready?model=a", 0), ("/ready?model=b", 1), ("/ready", 1)):
        found = (await place.ask(path))[1].get("degraded", [])
        assert len(found) == degraded, path


async def test_models_are_loaded_when_asked_for_and_unloaded_when_idle(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()  # until no more requests come
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    place = await make(load="on-demand", idle_unload=0.9, hold_seconds=0.05)
    assert not place.loaded
    _, models = await place.ask("/v1/models")
    assert [one["id"] for one in models["data"]] == ["a", "b"]
    assert (await place.ask("/ready"))[0] == 200
    assert (await place.ask("/ready?model=b"))[0] == 503
    assert 'rootlace_up{model="b"} 0.0' in (await place.ask("/metrics"))[1]
    body = {"text": "hi", "model": "b", "sampling_params": {"max_new_tokens": 2}}
    first = place.ask("/generate", body), place.ask("/generate", body)
    assert [status for status, _ in await asyncio.gather(*first)] == [200, 200]
    assert place.loaded == ["b"]
    (running,) = (await place.ask("/api/ps"))[1]["models"]
    until_then = datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)
    assert running["name"] == "b" and until_then.total_seconds() < 1
    slot = place.registry.slot("b")
    model = weakref.ref(slot.model)
    said = await place.ask("/v1/responses", {"input": "hi", "model": "b", "max_output_tokens": 2})
    now += 1.0
    await until(lambda: slot.model is None and not place.registry._closing)
    gc.collect()
    assert model() is None
    assert (await place.ask(f"/v1/responses/{said[1]['id']}"))[1] == said[
        1
    ]  # the engine outlives its model
    assert (await place.ask("/generate", body))[0] == 200
    assert place.loaded == ["b", "b"]


async def test_keep_alive_of_nothing_unloads_a_model_that_was_loaded_on_demand(make: Make) -> None:
    place = await make(load="on-demand", hold_seconds=0.05)
    slot = place.registry.slot("b")
    asked = {"model": "b", "messages": [{"role": "user", "content": "hi"}]}
    asked["options"] = {"num_predict": 2}
    for path, body, kept in (
        ("/api/chat", asked, True),
        ("/api/chat", {**asked, "keep_alive": "5m"}, True),
        ("/api/chat", {**asked, "keep_alive": -1}, True),
        (
            "/v1/chat/completions",
            {"model": "b", "messages": asked["messages"], "keep_alive": 0},
            True,
        ),
        ("/api/chat", {**asked, "keep_alive": 0}, False),
        ("/api/chat", {**asked, "keep_alive": 0, "stream": False}, False),
        ("/api/embed", {"model": "b", "input": "hi", "keep_alive": "0s"}, False),
    ):
        assert (await place.ask(path, body))[0] == 200
        await until(lambda: not slot.users)
        assert (slot.model is not None) == kept, body
    for odd in ({"keep_alive": [0]}, {"timeout": {}}):
        status, reply = await place.ask("/api/chat", {**asked, **odd})
        assert status == 400 and "b" in place.loaded and "a" not in place.loaded, reply
    wrong = {"keep_alive": 0, "options": {"num_predict": "x"}}
    assert (await place.ask("/api/chat", {**asked, **wrong}))[0] == 400
    await until(lambda: not slot.users)
    assert slot.model is not None
    # `ollama stop` sends this.
    _, reply = await place.ask("/api/generate", {"model": "b", "keep_alive": 0})
    assert reply["done_reason"] == "unload" and slot.model is None
    loaded = place.loaded[:]
    for path, body in (("generate", {"prompt": ""}), ("chat", {"messages": []}), ("chat", {})):
        _, reply = await place.ask(f"/api/{path}", {"model": "b:latest", "keep_alive": 0, **body})
        assert (reply["model"], reply["done_reason"]) == ("b", "unload")
    assert (await place.ask("/api/generate", {"model": "c", "keep_alive": 0}))[0] == 404
    assert place.loaded == loaded  # the model was not loaded in order to be unloaded
    # A running request keeps its model.
    assert (await place.ask("/api/chat", asked))[0] == 200
    async with place.registry.use("b"):
        assert (await place.ask("/api/chat", {**asked, "keep_alive": 0}))[0] == 200
        assert slot.model is not None


async def test_a_model_that_was_loaded_at_the_start_leaves_no_memory_taken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLEARED_SECONDS", 0.05)
    place = await make(idle_unload=0.1, hold_seconds=0.05)
    slot = place.registry.slot("b")
    assert slot.model is not None
    model = weakref.ref(slot.model)
    gc.freeze()  # a server does this after its start
    await until(lambda: model() is None)


async def test_a_load_that_fails_unexpectedly_is_not_tried_with_every_request(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, tries = await make(load="on-demand"), []

    async def open_model(*given: object) -> ServedModel:
        tries.append(given)
        raise KeyError("vocab")

    monkeypatch.setattr(module, "open_model", open_model)
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 50.0)
    for _ in range(2):
        assert (await place.ask("/v1/completions", {"prompt": "hi"}))[0] == 500
    assert len(tries) == 1


async def test_a_key_is_told_neither_paths_nor_when_others_used_a_model(
    make: Make, tmp_path: Path
) -> None:
    path = str(tmp_path / "keys.json")
    key, entry = new_key("k")
    write_keys(path, [entry])
    place = await make(load="on-demand", idle_unload=60.0, keys_file=path, api_key="operator")
    body = {"prompt": "hi", "model": "a", "max_tokens": 1}
    assert (await place.ask("/v1/completions", body, "operator"))[0] == 200
    assert place.loaded == ["a"]  # and `b` is not loaded

    (running,) = (await place.ask("/api/ps", key=key))[1]["models"]
    assert running["expires_at"] == NEVER
    (running,) = (await place.ask("/api/ps", key="operator"))[1]["models"]
    assert running["expires_at"] != NEVER
    for sent, reason in ((key, "load"), ("operator", "unload")):
        asked = {"model": "a", "keep_alive": 0}
        assert (await place.ask("/api/generate", asked, sent))[1]["done_reason"] == reason
        assert (place.registry.slot("a").model is None) == (reason == "unload")

    for name in "ab":
        for where in (f"/v1/models/{name}", f"/get_model_info?model={name}"):
            assert "/m/" not in str(await place.ask(where, key=key)), where
            assert f"/m/{name}" in str(await place.ask(where, key="operator")), where
    for where in ("/v1/models", "/api/tags", "/api/ps"):
        assert "/m/" not in str(await place.ask(where, key=key)), where

    context, shown = zmq.asyncio.Context(), {}
    for sent in (key, "operator"):
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.connect(place.programs.address)
        await peer.send(encode([Hello(0, PROTOCOL_VERSION, sent, model="a")]))
        (event,) = decode_events(await soon(peer.recv()))
        assert isinstance(event, Welcome)
        shown[sent] = event.model
    context.destroy(linger=0)
    assert "/m/" not in str(shown[key]) and shown["operator"].path == "/m/a"


async def test_who_only_looks_neither_loads_a_model_nor_keeps_it(make: Make) -> None:
    place = await make(load="on-demand")
    watched = ("/get_server_info", "/server_info", "/cache/tree", "/cache/lint", "/cache/pins")
    for path in watched:
        status, error = await place.ask(f"{path}?model=b")
        assert (status, error["error"]["code"]) == (503, "unavailable"), path
        assert error["error"]["message"] == "the model b is not loaded"
    status, said = await place.ask("/flush_cache", {"model": "b"})
    assert (status, said) == (200, "The model b is not loaded.\n") and not place.loaded
    slot = place.registry.slot("b")
    await place.ask("/v1/completions", {"prompt": "hi", "model": "b", "max_tokens": 1})
    used = slot.used
    for path in watched:
        assert (await place.ask(f"{path}?model=b"))[0] == 200, path
    assert (await place.ask("/flush_cache", {"model": "b"}))[1] == "Cache flushed.\n"
    assert place.engines["b"].flushes == 1 and slot.used == used
    assert place.loaded == ["b"]


async def test_a_model_that_crashes_disturbs_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 50.0)
    place = await make()
    place.engines["b"].paused = True
    slow = asyncio.create_task(place.ask("/v1/completions", {"prompt": "hi", "model": "b"}))
    await until(lambda: bool(place.engines["b"].submitted))
    place.engines["a"].paused = True
    dying = asyncio.create_task(place.ask("/v1/completions", {"prompt": "hi", "model": "a"}))
    await until(lambda: bool(place.engines["a"].submitted))
    place.exits["a"]("it died four times")
    status, error = await soon(dying)
    assert status == 503 and "the model a was unloaded" in error["error"]["message"]
    assert not place.registry.slot("a").users
    assert place.registry.slot("a").model is None
    assert (await place.ask("/health"))[0] == 200
    place.broken.add("a")
    status, error = await place.ask("/v1/completions", {"prompt": "hi", "model": "a"})
    said = "the model a cannot be loaded: config.json: it is gone"  # without a path of the server
    assert (status, error["error"]["message"]) == (503, said)  # not the client's fault
    # The load is not repeated with every request.
    status, error = await place.ask("/v1/completions", {"prompt": "hi", "model": "a"})
    assert status == 503 and f"{said} (it is tried again in" in error["error"]["message"]
    with monkeypatch.context() as patched:  # an unexpected error is not told in full, either
        patched.setattr(module, "open_model", no_disk)
        place.registry.slot("a")._retry_at = 0.0
        for known in ("internal error", "internal error (OSError) (it is tried again in"):
            status, error = await place.ask("/v1/completions", {"prompt": "hi", "model": "a"})
            said = error["error"]["message"]
            assert status == 500 and said.startswith(known) and "secret" not in said
    place.broken.clear()
    place.registry.slot("a")._retry_at = 0.0
    assert (await place.ask("/v1/completions", {"prompt": "hi", "model": "a"}))[0] == 200
    while not slow.done():
        place.engines["b"].step()
        await asyncio.sleep(0)
    assert (await slow)[0] == 200 and place.loaded == ["a", "b", "a", "a"]


async def no_disk(*_: object) -> ServedModel:
    raise OSError(28, "No space left on device", "/srv/secret")


async def test_who_stops_waiting_for_a_model_leaves_it_loading(make: Make) -> None:
    place = await make(load="on-demand")
    place.gate.clear()
    first, second = (asyncio.create_task(place.registry.load("b")) for _ in range(2))
    other = asyncio.create_task(place.registry.load("a"))
    await until(lambda: bool(place.loaded))
    first.cancel()
    await asyncio.sleep(0)
    place.gate.set()
    assert await second is place.registry.slot("b").model and await other
    assert place.loaded == ["b", "a"]  # loaded one after the other
    place.exits["a"]("it died")
    place.gate.clear()
    dying = asyncio.create_task(place.registry.load("a"))
    await until(lambda: len(place.loaded) == 3)
    await place.registry.stop()
    with pytest.raises(asyncio.CancelledError):
        await dying


async def test_a_model_that_is_stopped_while_it_loads_does_not_stay(make: Make) -> None:
    place = await make(load="on-demand")
    slot = place.registry.slot("b")
    place.gate.clear()
    left = asyncio.create_task(place.registry.load("b"))
    await until(lambda: bool(place.loaded))
    left.cancel()
    asked = {"model": "b", "keep_alive": 0}
    stopped = asyncio.create_task(place.ask("/api/generate", asked))
    await until(lambda: bool(slot.users) or stopped.done())
    place.gate.set()
    assert (await stopped)[1]["done_reason"] == "unload"
    await until(lambda: slot.loading is None)
    assert slot.model is None and place.loaded == ["b"]


async def test_a_timeout_includes_the_time_of_a_load(make: Make) -> None:
    place = await make(load="on-demand")
    place.gate.clear()
    body = {"prompt": "hi", "model": "b", "max_tokens": 1}
    status, error = await place.ask("/v1/completions", {**body, "timeout": 0.01})
    assert status == 408 and "0.01 s" in error["error"]["message"]
    assert place.loaded == ["b"] and not place.registry.slot("b").users
    slow = asyncio.create_task(place.ask("/v1/completions", {**body, "timeout": 50}))
    await until(lambda: place.registry.slot("b").users == 1)
    await asyncio.sleep(0.02)
    place.gate.set()
    assert (await slow)[0] == 200
    left = place.engines["b"].submitted[-1].handling.timeout
    assert left is not None and left < 50 - 0.01


async def test_programs_choose_when_they_connect(make: Make) -> None:
    place = await make(load="on-demand", idle_unload=0.05)

    @rl.function
    def program(s):
        s += "hi" + rl.gen("x", max_tokens=2)

    def run(model: str) -> str:
        endpoint = rl.RuntimeEndpoint(place.programs.address, model=model)
        try:
            assert program.run(backend=endpoint)["x"]
            return endpoint.get_model_name()
        finally:
            endpoint.close()

    assert await asyncio.to_thread(run, "b") == "b"
    assert await asyncio.to_thread(run, "") == "a"
    assert place.loaded == ["b", "a"]
    with pytest.raises(ModelNotFound):
        await asyncio.to_thread(run, "c")


async def test_programs_that_wait_for_their_model_count_as_connected(make: Make) -> None:
    place = await make(load="on-demand", max_connections=2)
    place.gate.clear()
    context = zmq.asyncio.Context()
    peers = []
    for _ in range(3):
        peers.append(peer := context.socket(zmq.DEALER))
        peer.linger = 0
        peer.connect(place.programs.address)
        hello = encode([Hello(0, PROTOCOL_VERSION)])
        await peer.send(hello)
        if len(peers) < 3:
            await until(lambda: len(place.programs._greeting) == len(peers))
            await peer.send(hello)  # a second hello is no second client
    (refused,) = decode_events(await soon(peers[2].recv()))
    assert isinstance(refused, Failed) and refused.code == "overloaded"
    place.gate.set()
    for peer in peers[:2]:
        (event,) = decode_events(await soon(peer.recv()))
        assert isinstance(event, Welcome)
    context.destroy(linger=0)
