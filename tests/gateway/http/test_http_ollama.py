"""Ollama's endpoints over scripted answers."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rootlace.wire.protocol import Constraint, Text
from tests.gateway.http.conftest import Served
from tests.gateway.http.fake_gateway import FakeChat

ASK: dict[str, Any] = {"model": "fake:latest", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAID = '<think>hm</think>\n\nwell<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'


async def lines(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    async with served.http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return [json.loads(line) for line in (await reply.text()).splitlines()]


@pytest.mark.parametrize("stream", [None, False])
async def test_chat(served: Served, stream: bool | None) -> None:
    served.gateway.chat.source = "{# <think> </think> #}"
    served.gateway.script = lambda prompt, index: SAID
    body = {**ASK, "tools": [TOOL], "stream": stream, "think": True}
    replies = await lines(served, "/api/chat", body)
    assert (len(replies) > 5) == (stream is None)
    messages = [reply["message"] for reply in replies]
    assert "".join(message["content"] for message in messages) == "well"
    assert "".join(message.get("thinking", "") for message in messages) == "hm"
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls == [{"function": {"name": "f", "arguments": {"x": 1}}}]
    assert [reply["done"] for reply in replies] == [False] * (len(replies) - 1) + [True]
    last = replies[-1]
    assert (last["done_reason"], last["eval_count"]) == ("stop", len(SAID))
    assert last["prompt_eval_count"] > 0 and last["total_duration"] > 0
    assert served.gateway.chat.last["kw"] == {"thinking": True, "enable_thinking": True}


async def test_generate(served: Served) -> None:
    body = {"model": "fake", "prompt": "hi", "system": "s", "stream": False}
    (reply,) = await lines(served, "/api/generate", body)
    assert (reply["response"], reply["done"]) == ("hello", True)
    assert [m["role"] for m in served.gateway.chat.last["messages"]] == ["system", "user"]
    pieces = await lines(served, "/api/generate", {**body, "raw": True, "stream": True})
    assert "".join(piece["response"] for piece in pieces) == "hello"
    assert served.gateway.last_parts == (Text(""), Text("hi", special=True))
    (loaded,) = await lines(served, "/api/generate", {"model": "fake", "keep_alive": 0})
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


async def test_options_and_history(served: Served) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 0,
        "repeat_penalty": 1.1,
        "stop": ["z"],
        "num_ctx": 4096,
        "typical_p": 1.0,
    }
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_name": "f"},
    ]
    body = {**ASK, "messages": messages, "options": options, "stream": False}
    (reply,) = await lines(served, "/api/chat", {**body, "format": {"type": "integer"}})
    assert (reply["message"]["content"], reply["done_reason"]) == ("hel", "length")
    generate = served.gateway.last_generate
    params = generate.params
    assert (params.max_tokens, params.temperature, params.top_k) == (3, 0.5, -1)
    assert (params.repetition_penalty, params.stop) == (1.1, ("z",))
    assert generate.constraint == Constraint("json_schema", '{"type":"integer"}')
    sent = served.gateway.chat.last["messages"]
    assert sent[1]["tool_calls"][0]["function"] == call["function"]
    assert sent[2] == {"role": "tool", "content": "3", "name": "f"}
    await lines(served, "/api/chat", {**ASK, "options": {"num_predict": -1}})
    assert served.gateway.last_generate.params.max_tokens is None


async def test_what_is_served(served: Served) -> None:
    for path in ("/api/tags", "/api/ps"):
        async with served.http.get(path) as reply:
            assert [model["model"] for model in (await reply.json())["models"]] == ["fake"]
    assert not (await running(served))["size"]  # there are no files
    async with served.http.post("/api/show", json={"model": "fake"}) as reply:
        shown = await reply.json()
    assert shown["template"] == FakeChat.source and "completion" in shown["capabilities"]
    async with served.http.get("/api/version") as reply:
        assert (await reply.json())["version"]


async def running(served: Served) -> Any:
    async with served.http.get("/api/ps") as reply:
        (model,) = (await reply.json())["models"]
    async with served.http.get("/api/tags") as reply:
        assert model.items() >= (await reply.json())["models"][0].items()
    return model


async def test_the_files_of_a_model(served: Served, tmp_path: Path) -> None:
    gateway = served.gateway
    gateway.model_info = msgspec.structs.replace(gateway.model_info, path=str(tmp_path))
    digests = []
    for size in (100, 300):
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        (tmp_path / "config.json").write_bytes(b"{}")
        first, model = await running(served), await running(served)
        assert model["digest"] == first["digest"] and len(bytes.fromhex(model["digest"])) == 32
        assert (model["size"], model["size_vram"]) == (size + 2, 0)
        assert datetime.fromisoformat(model["expires_at"]).year > 2100
        digests.append(model["digest"])
    assert digests[0] != digests[1]
    gateway.engine.info = msgspec.structs.replace(gateway.engine.info, device="cuda:0")
    assert (await running(served))["size_vram"] == 302


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_was_cut_is_none(served: Served, stream: bool) -> None:
    """A limit ends the answer somewhere in its call."""
    served.gateway.chat.source = "{# <think> </think> #}"
    served.gateway.script = lambda prompt, index: SAID
    whole = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    end = SAID.index("}</tool_call>")
    for written in (end - 20, end - 9, end - 7, end - 1, end, end + 3):
        body = {**ASK, "tools": [TOOL], "stream": stream, "options": {"num_predict": written}}
        replies = await lines(served, "/api/chat", body)
        calls = [call for reply in replies for call in reply["message"].get("tool_calls", ())]
        assert calls == (whole if written >= end else []), SAID[:written]
        assert replies[-1]["done_reason"] == "length"


@pytest.mark.parametrize(
    "given, status, says",
    [
        ({"model": "other"}, 404, "does not exist"),
        ({"options": {"mirostat": 1}}, 400, "top_p"),
        ({"options": {"temprature": 1}}, 400, "Did you mean 'temperature'?"),
        ({"options": {"num_predict": 2**40}}, 400, "num_predict"),
        ({"seed": 1}, 400, "Did you mean 'options.seed'?"),
        ({"max_new_tokens": 1}, 400, "Did you mean 'options.num_predict'?"),
        ({"repetition_penalty": 1}, 400, "Did you mean 'options.repeat_penalty'?"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400, "text"),
    ],
)
async def test_refusals(served: Served, given: dict[str, Any], status: int, says: str) -> None:
    async with served.http.post("/api/chat", json={**ASK, **given}) as reply:
        assert reply.status == status
        assert says in (await reply.json())["error"]  # a text, as Ollama's clients expect it
