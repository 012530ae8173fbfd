"""Conversations that clients send back: known fields are read, all others are dropped."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel
from tests.server.http.test_http_batches import row, start, until

USER: dict[str, Any] = {"role": "user", "content": "hi"}
# Fields that openai's client, litellm, OpenRouter, vLLM, Gemini's interface and others add.
ADDED: dict[str, Any] = {
    "id": "msg_1",
    "parsed": {"city": "Paris"},
    "reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0}],
    "thinking": "hm",
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    "provider_specific_fields": {"refusal": None, "reasoning": "hm"},
    "extra_content": {"google": {"thought_signature": "x"}},
    "annotations": [{"type": "url_citation", "url_citation": {"url": "x"}}],
    "cache_control": {"type": "ephemeral"},
    "prefix": False,
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
WORN_CALL = {
    **CALL,
    "index": 0,
    "provider_specific_fields": {"thought_signature": "x"},
    "extra_content": {"google": {"thought_signature": "x"}},
    "function": {**CALL["function"], "parsed_arguments": {"x": 1}, "provider_specific_fields": {}},  # type: ignore[dict-item]
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}
# openai's `ChatCompletionMessage.model_dump()`.
DUMPED = {
    "content": "yes",
    "refusal": None,
    "role": "assistant",
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}


async def _read(served: Served, path: str, body: dict[str, Any]) -> Any:
    """The messages as the template gets them."""
    assert (await served.post(path, {"model": "fake", **body})).status == 200
    return served.model.chat.last["messages"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "worn, plain",
    [
        ({"role": "assistant", "content": "yes", **ADDED}, {"role": "assistant", "content": "yes"}),
        (DUMPED, {"role": "assistant", "content": "yes"}),
        (
            {**DUMPED, "content": None, "refusal": "no"},
            {"role": "assistant", "content": "no"},
        ),
        (
            {**DUMPED, "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        (
            {**USER, "content": [{"type": "text", "text": "hi", "id": 3, "annotations": []}]},
            USER,
        ),
        (
            {**DUMPED, "content": None, "tool_calls": [WORN_CALL], **ADDED},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
    ],
)
async def test_chat(served: Served, path: str, worn: Any, plain: Any) -> None:
    after = RESULT if worn.get("tool_calls") else USER
    last = await _read(served, path, {"messages": [USER, worn, after]})
    assert last == await _read(served, path, {"messages": [USER, plain, after]})


@pytest.mark.parametrize(
    "given, thoughts",
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning": "other", "reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm", "reasoning_content": None}, "hm"),
        ({"reasoning": {"effort": "low"}}, None),
        ({"reasoning": None}, None),
        ({"reasoning_content": ""}, None),
    ],
)
async def test_thoughts_by_another_name(served: Served, given: Any, thoughts: str | None) -> None:
    message = {"role": "assistant", "content": "yes", **given}
    last = await _read(served, "/v1/chat/completions", {"messages": [USER, message, USER]})
    assert last[1].get("reasoning_content") == thoughts


async def test_responses(served: Served) -> None:
    """The items of an answer, as openai's client dumps them."""
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"id": "rs", "type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]},
        {
            "id": "msg",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "yes"}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    plain = await _read(served, "/v1/responses", {"input": items})
    for item in items:
        item |= {**ADDED, "parsed_arguments": {"x": 1}, "created_by": "me", "phase": None}
        for part in item.get("content", ()):
            part |= {"annotations": [], "logprobs": [], "parsed": {"x": 1}}
    assert await _read(served, "/v1/responses", {"input": items}) == plain


async def test_anthropic(served: Served) -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "yes"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    body = {"max_tokens": 3, "messages": [USER, *messages]}
    plain = await _read(served, "/v1/messages", body)
    for one in (*blocks, result, *messages):
        one |= {"signature": "x", "citations": None, "parsed_output": {"x": 1}, "index": 0}
    messages[0] |= {"id": "msg", "stop_reason": "tool_use", "type": "message", "usage": {}}
    assert await _read(served, "/v1/messages", body) == plain


async def test_ollama(served: Served) -> None:
    call: dict[str, Any] = {"function": {"name": "f", "arguments": {"x": 1}}}
    message = {"role": "assistant", "content": "yes", "tool_calls": [call]}
    body = {"stream": False, "messages": [USER, message, {"role": "tool", "content": "3"}]}
    plain = await _read(served, "/api/chat", body)
    call |= {"id": "call_0", "type": "function", "extra_content": {}}
    call["function"] |= {"index": 0, "description": "f"}
    message |= {**ADDED, "thinking": "", "images": None, "tool_name": None}
    assert await _read(served, "/api/chat", body) == plain


async def test_a_batch(serve: Serve, tmp_path: Path) -> None:
    """A batch decodes its rows like other bodies."""
    served = await serve(FakeModel(files=str(tmp_path)))
    message = {"role": "assistant", "content": "yes", **ADDED}
    batch = await start(served, [row("1", messages=[USER, message, USER], xyzzy=None)])
    batch = await until(served, batch.id, "completed", "failed")
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert served.model.chat.last["messages"][1] == {"role": "assistant", "content": "yes"}


async def test_what_is_dropped_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    name = "rootlace.runtime.server.http.body"
    message = {"role": "assistant", "content": "", "tool_calls": [WORN_CALL], "parsed": None}
    body = {"messages": [USER, message, RESULT]}
    with caplog.at_level(logging.INFO, name):
        await _read(served, "/v1/chat/completions", body)
    assert not [r for r in caplog.records if r.name == name]
    with caplog.at_level(logging.DEBUG, name):
        await _read(served, "/v1/chat/completions", body)
        raw = b'{"messages": [{"role": "user", "content": "hi", "more": 1e999}]}'
        headers = {"Content-Type": "application/json"}
        async with served.http.post("/v1/chat/completions", data=raw, headers=headers) as reply:
            assert reply.status == 200  # logging does not matter
    record, other = [r.getMessage() for r in caplog.records if r.name == name]
    assert other.endswith(": messages[0].more")
    for path in ("parsed", "tool_calls[0].function.parsed_arguments", "tool_calls[0].index"):
        assert f"messages[1].{path}" in record
    assert "content" not in record.replace("extra_content", "")


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "user", "contents": "hi"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0]"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": 3}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "tool_calls[0].function"),
    ],
)
async def test_content_is_never_dropped(served: Served, message: Any, param: str) -> None:
    async with served.http.post("/v1/chat/completions", json={"messages": [message]}) as reply:
        assert reply.status == 400 and param in (await reply.json())["error"]["param"]


@pytest.mark.parametrize(
    "path, body, missing",
    [
        ("/api/chat", {"messages": [{"role": "user", "contnt": "hi"}]}, "messages[0].content"),
        (
            "/v1/chat/completions",
            {"messages": [{**USER, "content": [{"type": "text", "txt": "hi"}]}]},
            "messages[0].content[0].text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{**USER, "content": [{"type": "refusal", "text": "hi"}]}]},
            "messages[0].content[0].refusal",
        ),
        (
            "/v1/responses",
            {"input": [{**USER, "content": [{"type": "input_text", "txt": "hi"}]}]},
            "input[0].content[0].text",
        ),
        (
            "/v1/responses",
            {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]: only text is served, not 'input_image'",
        ),
    ],
)
async def test_what_is_misspelt_is_missed(
    served: Served, path: str, body: dict[str, Any], missing: str
) -> None:
    """A dropped field does not count as an empty text."""
    async with served.http.post(path, json={"model": "fake", **body}) as reply:
        assert reply.status == 400
        assert missing in await reply.text()
