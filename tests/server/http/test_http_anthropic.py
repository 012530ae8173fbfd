"""Anthropic's messages over scripted answers: input of the template, and answers."""

import json
from typing import Any

import pytest

from rootlace.runtime.server.http import anthropic
from rootlace.wire.protocol import Append, Constraint, Prefill, Text
from rootlace.wire.sampling import Cache
from tests.server.http.conftest import Served

ASK = {"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
SAID = '<think>hm</think>\n\nwell<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'


async def post(served: Served, body: dict[str, Any], path: str = "/v1/messages") -> tuple[int, Any]:
    async with served.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


async def events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with served.http.post("/v1/messages", json={**body, "stream": True}) as reply:
        blocks = (await reply.text()).strip().split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_blocks_of_an_answer(served: Served) -> None:
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: SAID
    _, reply = await post(served, {**ASK, "tools": [TOOL]})
    thinking, text, call = reply["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "well")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"x": 1})
    assert (reply["stop_reason"], reply["type"], reply["role"]) == (
        "tool_use",
        "message",
        "assistant",
    )


async def test_a_stream_builds_the_same_blocks(served: Served) -> None:
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: SAID
    found = await events(served, {**ASK, "tools": [TOOL]})
    assert [found[0]["type"], found[-2]["type"], found[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({"type": event["content_block"]["type"], "text": "", "open": True})
        elif event["type"] == "content_block_delta":
            assert blocks[event["index"]]["open"]
            delta = event["delta"]
            blocks[event["index"]]["text"] += next(delta[k] for k in delta if k != "type")
        else:
            blocks[event["index"]]["open"] = False
    assert [(b["type"], b["text"], b["open"]) for b in blocks] == [
        ("thinking", "hm", False),
        ("text", "well", False),
        ("tool_use", '{"x":1}', False),
    ]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == len(SAID)


async def test_what_the_template_gets(served: Served) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "3", "is_error": False},
                {"type": "text", "text": "so?"},
            ],
        },
        {"role": "assistant", "content": "I say"},
    ]
    given = {**ASK, "messages": messages, "system": [{"type": "text", "text": "s"}]}
    status, _ = await post(served, {**given, "tools": [TOOL], "thinking": {"type": "enabled"}})
    assert status == 200
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    last = served.model.chat.last
    assert last["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "I say"},
    ]
    assert last["kw"] == {"continue_final": True, "thinking": True, "enable_thinking": True}
    assert last["tools"][0]["function"] == {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object"},
    }


async def test_parameters(served: Served) -> None:
    schema = {"type": "integer"}
    given = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "stop_sequences": ["o"],
        "cache_salt": "t",
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    _, reply = await post(served, {**ASK, **given})
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "o")
    generate = served.model.last_generate
    params = generate.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.5, 3)
    assert (params.stop, params.max_tokens) == (("o",), 99)
    assert generate.constraint == Constraint("json_schema", '{"type":"integer"}')
    assert served.model.sessions[-1].ops[0].namespace == "t"  # type: ignore[union-attr]
    _, reply = await post(served, {**ASK, "max_tokens": 2, "top_k": 0})
    assert reply["stop_reason"] == "max_tokens"
    assert served.model.last_generate.params.top_k == 0  # off, as for other interfaces


async def test_the_cache_is_accounted(served: Served) -> None:
    """The fake gateway finds half of a prompt: `<user>hi<assistant>` are 19 bytes."""
    _, plain = await post(served, ASK)
    assert plain["usage"] == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": 9,
        "output_tokens": 5,
    }
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    _, marked = await post(served, {**ASK, "messages": [{"role": "user", "content": [part]}]})
    # `<user>hi` is computed first, half of it; the rest of the prompt finds that prefix cached.
    assert marked["usage"] == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 4,
        "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": 5,
        "output_tokens": 5,
    }
    counted = {"model": "fake", "messages": ASK["messages"]}
    assert await post(served, counted, "/v1/messages/count_tokens") == (200, {"input_tokens": 19})


async def test_a_stream_begins_with_what_its_prompt_is(served: Served) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for messages in (ASK["messages"], [{"role": "user", "content": [part]}]):
        found = await events(served, {**ASK, "messages": messages})
        start, end = found[0]["message"]["usage"], found[-2]["usage"]
        assert start == {**end, "output_tokens": 0} and start["input_tokens"] == 10


async def test_a_call_that_a_stop_sequence_cut(served: Served) -> None:
    served.model.script = lambda prompt, index: SAID
    given = {**ASK, "tools": [TOOL], "stop_sequences": ["1"]}
    _, reply = await post(served, given)
    stopped = {"stop_reason": "stop_sequence", "stop_sequence": "1"}
    assert stopped.items() <= reply.items() and reply["content"][-1]["name"] == "f"
    assert (await events(served, given))[-2]["delta"] == stopped


async def test_what_is_written_of_a_forced_call_is_counted(served: Served) -> None:
    given = {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}
    _, reply = await post(served, {**ASK, **given})
    usage = reply["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    counted = {"messages": ASK["messages"], "model": "fake"}
    _, plain = await post(served, {**counted, "tools": given["tools"]}, "/v1/messages/count_tokens")
    _, forced = await post(served, {**counted, **given}, "/v1/messages/count_tokens")
    assert forced["input_tokens"] == total == plain["input_tokens"] + len("<tool_call>\n")


IMAGE = {"type": "image", "source": {}}


@pytest.mark.parametrize(
    "given, param",
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"stop": "x"}, "stop"),
    ],
)
async def test_refusals(served: Served, given: dict[str, Any], param: str) -> None:
    status, reply = await post(served, {**ASK, **given})
    assert status == 400 and reply["type"] == "error"
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["param"] == param, reply


async def test_marks_pin_the_prompt_up_to_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(content: str, ttl: str = "") -> dict[str, Any]:
        control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
        return {"type": "text", "text": content, "cache_control": control}

    body = {
        **ASK,
        "tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
        "system": [text("rules", "1h"), {"type": "text", "text": "more"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "ho"},
            {"role": "user", "content": [text("well"), {"type": "text", "text": "go on"}]},
        ],
    }
    _, reply = await post(served, body)
    ops = served.model.sessions[-1].ops
    appended = [
        "".join(part.text for part in op.parts if isinstance(part, Text))
        for op in ops
        if isinstance(op, Append)
    ]
    assert appended == [
        "[f]<system>rules",
        "\n\nmore<user>",
        "hi<assistant>ho<user>well",
        "\n\ngo on<assistant>",
    ]
    pins = [op.handling.cache for op in ops if isinstance(op, Prefill)]
    assert pins == [Cache("try", 3600.0), Cache("try", 300.0), Cache("try", 300.0)]
    usage = reply["usage"]
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == 8
    assert usage["cache_creation_input_tokens"] == sum(usage["cache_creation"].values())
    many = {"role": "user", "content": [text(str(n)) for n in range(5)]}
    # A mark costs time by the prompt's length: requests without marks, or refused, pay none.
    monkeypatch.setattr(anthropic, "_differently", None)
    status, error = await post(served, {**ASK, "messages": [many]})
    assert status == 400 and "at most 4 places" in error["error"]["message"]
    unmarked = {**ASK, "system": [{"type": "text", "text": "rules"}]}
    assert (await post(served, unmarked))[0] == 200
