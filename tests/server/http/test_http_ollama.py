"""Ollama's endpoints over scripted answers."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from rootlace.runtime.server.http.ollama_models import _shown
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint, Text
from tests.model.gguf.writing import Entry, write
from tests.server.http.conftest import Served
from tests.server.http.fake_model import FakeChat
from tests.tiny_model import make_tiny_model

ASK: dict[str, Any] = {"model": "fake:latest", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAID = '<think>hm</think>\n\nwell<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'


async def lines(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    async with served.http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return [json.loads(line) for line in (await reply.text()).splitlines()]


@pytest.mark.parametrize("stream", [None, False])
async def test_chat(served: Served, stream: bool | None) -> None:
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: SAID
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
    assert served.model.chat.last["kw"] == {"thinking": True, "enable_thinking": True}


async def test_generate(served: Served) -> None:
    body = {"model": "fake", "prompt": "hi", "system": "s", "stream": False}
    (reply,) = await lines(served, "/api/generate", body)
    assert (reply["response"], reply["done"]) == ("hello", True)
    assert [m["role"] for m in served.model.chat.last["messages"]] == ["system", "user"]
    pieces = await lines(served, "/api/generate", {**body, "raw": True, "stream": True})
    assert "".join(piece["response"] for piece in pieces) == "hello"
    assert served.model.last_parts == (Text(""), Text("hi", special=True))
    (loaded,) = await lines(served, "/api/generate", {"model": "fake", "keep_alive": 0})
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_logprobs_are_of_all_tokens(served: Served, path: str) -> None:
    """Log-probabilities cover also tokens without a line of their own, such as those of a call."""
    served.model.script = lambda prompt, index: SAID
    body = {**ASK, "tools": [TOOL]} if path == "/api/chat" else {"model": "fake", "prompt": "hi"}
    for stream in (None, False):
        asked = {**body, "stream": stream, "logprobs": True, "top_logprobs": 2}
        replies = await lines(served, path, asked)
        tokens = [token for reply in replies for token in reply.get("logprobs", ())]
        assert "".join(token["token"] for token in tokens) == SAID
        assert bytes(byte for token in tokens for byte in token["bytes"]) == SAID.encode()
        assert all(len(token["top_logprobs"]) == 2 for token in tokens)
        assert "logprobs" not in (await lines(served, path, {**body, "stream": stream}))[0]
    for wrong in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        async with served.http.post(path, json={**body, **wrong}) as reply:
            assert reply.status == 400 and "top_logprobs" in (await reply.json())["error"]


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
    generate = served.model.last_generate
    params = generate.params
    assert (params.max_tokens, params.temperature, params.top_k) == (3, 0.5, 0)
    assert (params.repetition_penalty, params.stop) == (1.1, ("z",))
    assert generate.constraint == Constraint("json_schema", '{"type":"integer"}')
    sent = served.model.chat.last["messages"]
    assert sent[1]["tool_calls"][0]["function"] == call["function"]
    assert sent[2] == {"role": "tool", "content": "3", "name": "f"}
    await lines(served, "/api/chat", {**ASK, "options": {"num_predict": -1}})
    assert served.model.last_generate.params.max_tokens is None


async def test_what_is_served(served: Served) -> None:
    for path in ("/api/tags", "/api/ps"):
        assert [entry["model"] for entry in (await served.get(path)).json()["models"]] == ["fake"]
    assert not (await running(served))["size"]  # the model has no files
    model = served.model
    model.model_info = msgspec.structs.replace(model.model_info, adapters=("formal",))
    tags = (await served.get("/api/tags")).json()["models"]
    assert [entry["model"] for entry in tags] == ["fake", "fake:formal"]
    shown = (await served.post("/api/show", {"model": "fake"})).json()
    assert shown["template"] == FakeChat.source and "completion" in shown["capabilities"]
    assert (await served.get("/api/version")).json()["version"]


async def running(served: Served) -> Any:
    (entry,) = (await served.get("/api/ps")).json()["models"]
    assert entry.items() >= (await served.get("/api/tags")).json()["models"][0].items()
    return entry


async def test_the_files_of_a_model(served: Served, tmp_path: Path) -> None:
    model = served.model
    model.model_info = msgspec.structs.replace(model.model_info, path=str(tmp_path))
    digests = []
    for size in (100, 300):
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        (tmp_path / "config.json").write_bytes(b"{}")
        first, entry = await running(served), await running(served)
        assert entry["digest"] == first["digest"] and len(bytes.fromhex(entry["digest"])) == 32
        assert (entry["size"], entry["size_vram"]) == (size + 2, 0)
        assert datetime.fromisoformat(entry["expires_at"]).year > 2100
        digests.append(entry["digest"])
    assert digests[0] != digests[1]
    model.engine.info = msgspec.structs.replace(model.engine.info, device="cuda:0")
    assert (await running(served))["size_vram"] == 302


async def details(served: Served, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the details in lists, and `model_info`, of the model at `path`."""
    model = served.model
    model.model_info = msgspec.structs.replace(model.model_info, path=str(path))
    shown = (await served.post("/api/show", {"model": "fake"})).json()
    assert (await running(served))["details"] == shown["details"]
    return shown["details"], shown["model_info"]


async def test_what_a_gguf_file_says(served: Served, tmp_path: Path) -> None:
    entries = [Entry("a.weight", (256, 5000), 12, 0), Entry("b.weight", (64,), 0, 720_000)]
    metadata = {
        "general.architecture": "qwen2",
        "general.basename": "Tiny",
        "general.file_type": 15,
        "qwen2.block_count": 3,
        "qwen2.context_length": 1 << 20,
        "qwen2.rope.freq_base": 0.5,
        "tokenizer.chat_template": "{{ text }}",
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    data = bytes(720_000 + 64 * 4)
    path = write(tmp_path / "m.gguf", metadata, entries, data)
    found, info = await details(served, path)
    assert found == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen2",
        "families": ["qwen2"],
        "parameter_size": "1.28M",
        "quantization_level": "Q4_K_M",
    }
    limit = served.model.model_info.context_length
    assert info == {
        "general.architecture": "qwen2",
        "general.basename": "Tiny",
        "general.file_type": 15,
        "general.parameter_count": 256 * 5000 + 64,
        "qwen2.block_count": 3,
        "qwen2.context_length": limit,  # the limit of requests, not the file's
        "qwen2.rope.freq_base": 0.5,
        "qwen2.vocab_size": served.model.model_info.vocab_size,
    }
    # For a mix without a name, the most frequent type is told. The file is read again on a change.
    del metadata["general.file_type"]
    write(path, metadata | {"general.name": "other"}, entries, data)
    found, _ = await details(served, path)
    assert found["quantization_level"] == "Q4_K"


async def test_what_a_folder_says(served: Served, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "numpy") as file:
        count = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    found, info = await details(served, folder)
    assert (found["format"], found["family"]) == ("safetensors", config["model_type"])
    assert found["parameter_size"] == f"{count / 1000:.0f}K"
    assert found["quantization_level"] == "F32"
    assert info["general.parameter_count"] == count
    assert info[f"{config['model_type']}.block_count"] == config["num_hidden_layers"]
    assert info[f"{config['model_type']}.embedding_length"] == config["hidden_size"]
    # The number of packed weights is unknown.
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    found, info = await details(served, folder)
    assert (found["parameter_size"], found["quantization_level"]) == ("", "GPTQ")
    assert "general.parameter_count" not in info


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [(259_584, "260K"), (134_515_008, "134.52M"), (8_030_261_248, "8.0B")],
)
def test_how_many_numbers_a_model_has(numbers: int, shown: str) -> None:
    assert _shown(numbers) == shown


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_sampling_beside_the_options(served: Served, path: str) -> None:
    """Vercel's `ollama-ai-provider-v2` sends these; `options` have priority."""
    body: dict[str, Any] = {"model": "fake", "prompt": "hi"} if path == "/api/generate" else ASK
    body = {**body, "temperature": 0, "top_p": 0.5, "max_output_tokens": 3}
    for options, expected in (
        (None, (0, 0.5, 3)),
        ({"num_ctx": 9}, (0, 0.5, 3)),
        ({"num_predict": 2, "top_p": 0.7}, (0, 0.7, 2)),
    ):
        await lines(served, path, {**body, "options": options})
        params = served.model.last_generate.params
        assert (params.temperature, params.top_p, params.max_tokens) == expected


async def test_tool_choice(served: Served) -> None:
    served.model.chat.call = '<tool_call>{"name":"$","arguments":%}</tool_call>'
    body = {**ASK, "tools": [TOOL, {"type": "function", "function": {"name": "g"}}]}
    kinds = {}
    for choice in (None, "auto", "none", "required", {"type": "function", "name": "g"}):
        await lines(served, "/api/chat", {**body, "tool_choice": choice})
        sent = served.model.last_generate.constraint
        kinds[str(choice)] = None if sent is None else sent.source
    assert kinds["None"] == kinds["auto"] != kinds["required"]
    assert kinds["none"] is None
    (named,) = (source for choice, source in kinds.items() if "'g'" in choice)
    assert '"g"' in str(named) and '"f"' not in str(named) and '"f"' in str(kinds["required"])
    for wrong in ("any", {"type": "function", "name": "h"}):
        async with served.http.post("/api/chat", json={**body, "tool_choice": wrong}) as reply:
            assert reply.status == 400 and "tool_choice" in (await reply.json())["error"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_was_cut_is_none(served: Served, stream: bool) -> None:
    """A limit cuts the answer within a call."""
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: SAID
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
        assert says in (await reply.json())["error"]  # Ollama's clients expect a text


async def test_a_format_that_allows_anything_is_still_json(served: Served) -> None:
    await lines(served, "/api/chat", {**ASK, "format": {}, "stream": False})
    assert served.model.last_generate.constraint == Constraint("json_schema", "{}")


async def test_a_refused_format_is_called_as_the_client_calls_it(served: Served) -> None:
    served.model.fail = InvalidConstraint("json_schema: #/type: no")
    async with served.http.post("/api/chat", json={**ASK, "format": {}, "stream": False}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"] == "format: json_schema: #/type: no"
