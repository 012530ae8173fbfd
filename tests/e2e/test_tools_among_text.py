"""Tools that the embedded model may call: it was trained on another, and calls that if possible."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import jsonschema
import pytest

import rootlace as rl

ASK = [{"role": "user", "content": "What is 37 times 12?"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "object", "properties": {"a": {"pattern": r"(a)\1"}}}


def post(runtime: rl.Runtime, path: str, body: dict[str, Any]) -> str:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{runtime.url}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return str(reply.read().decode())


def function(parameters: Any = PARAMETERS, **more: Any) -> dict[str, Any]:
    given = {"name": "multiply", "parameters": parameters, **more}
    return {"type": "function", "function": given}


def called(path: str, text: str) -> tuple[str, Any]:
    """Return the only call of a reply, or of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if path == "/v1/chat/completions":
        pieces = [event["choices"][0] for event in events]
        pieces = [piece.get("delta") or piece.get("message") for piece in pieces]
        calls = [call for piece in pieces for call in (piece or {}).get("tool_calls") or ()]
        name = "".join(call["function"].get("name") or "" for call in calls)
        return name, json.loads("".join(call["function"].get("arguments", "") for call in calls))
    if path == "/api/chat":
        (call,) = [call for event in events for call in event["message"].get("tool_calls") or ()]
        return call["function"]["name"], call["function"]["arguments"]
    if path == "/v1/responses":
        whole = next((e["response"] for e in events if e.get("type") == "response.completed"), None)
        output = (whole or events[0])["output"]
        (item,) = [item for item in output if item["type"] == "function_call"]
        return item["name"], json.loads(item["arguments"])
    if events[0]["type"] == "message":
        (block,) = [block for block in events[0]["content"] if block["type"] == "tool_use"]
        return block["name"], block["input"]
    begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    (name,) = [block["name"] for block in begun if block["type"] == "tool_use"]
    parts = [
        e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta"
    ]
    return name, json.loads("".join(parts))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"]
)
def test_a_tool_that_there_is_not_cannot_be_called(
    runtime: rl.Runtime, path: str, stream: bool
) -> None:
    with urllib.request.urlopen(f"{runtime.url}/v1/models", timeout=240) as reply:
        model = json.load(reply)["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "stream": stream}
    if path == "/v1/responses":
        tool = {"type": "function", **function()["function"]}
        body |= {"input": ASK, "tools": [tool], "temperature": 0, "max_output_tokens": 80}
    elif path == "/v1/messages":
        tool = {"name": "multiply", "input_schema": PARAMETERS}
        body |= {"messages": ASK, "tools": [tool], "temperature": 0, "max_tokens": 80}
    elif path == "/api/chat":
        options = {"temperature": 0, "num_predict": 80}
        body |= {"messages": ASK, "tools": [function()], "options": options}
    else:
        body |= {"messages": ASK, "tools": [function()], "temperature": 0, "max_tokens": 80}
    name, arguments = called(path, post(runtime, path, body))
    assert name == "multiply"
    jsonschema.validate(arguments, PARAMETERS)


@pytest.mark.parametrize(
    "strict, parameters, status",
    [(None, UNSUPPORTED, 200), (True, UNSUPPORTED, 400), (False, UNSUPPORTED, 200)],
)
def test_a_schema_that_cannot_be_held(
    runtime: rl.Runtime, strict: bool | None, parameters: Any, status: int
) -> None:
    tools = [function(parameters, strict=strict)]
    body = {"messages": ASK, "tools": tools, "temperature": 0, "max_tokens": 80}
    if status == 400:
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(runtime, "/v1/chat/completions", body)
        assert caught.value.code == 400
        assert json.load(caught.value)["error"]["param"] == "tools"
        return
    name, arguments = called("/v1/chat/completions", post(runtime, "/v1/chat/completions", body))
    assert name == "multiply" and isinstance(arguments, dict)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 7, "top_k": 20}])
@pytest.mark.parametrize("question", ["What is 37 times 12?", "Who are you?", "Tell me a story."])
def test_text_outside_of_calls_is_what_it_is_without_constraint(
    runtime: rl.Runtime, question: str, sampling: dict[str, Any]
) -> None:
    asked = {"messages": [{"role": "user", "content": question}], "tools": [function()]}
    prompt = json.loads(post(runtime, "/tokenize", asked))["tokens"]
    # Only the best: bytes that begin no character have some probability, and are never drawn.
    native = {{"seed": "sampling_seed"}.get(name, name): value for name, value in sampling.items()}
    params = {**native, "max_new_tokens": 60, "skip_special_tokens": False}
    free = post(runtime, "/generate", {"input_ids": prompt, "sampling_params": params})
    text = json.loads(free)["text"].partition("<tool_call>")[0]
    held = {**asked, **sampling, "max_tokens": 60, "logprobs": True}
    choice = json.loads(post(runtime, "/v1/chat/completions", held))["choices"][0]
    found = "".join(one["token"] for one in choice["logprobs"]["content"]).removesuffix(
        "<|im_end|>"
    )
    assert found.partition("<tool_call>")[0] == text
    assert choice["message"]["content"] or not text.strip()
