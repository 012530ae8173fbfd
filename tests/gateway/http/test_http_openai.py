"""OpenAI's endpoints, through the real `openai` client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest

from rootlace.wire.errors import InternalError, Overloaded, ServerUnavailable
from rootlace.wire.protocol import Text, Tokens
from tests.gateway.http.conftest import Served

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_completion(served: Served) -> None:
    reply = await served.openai().completions.create(model="fake", prompt="say", seed=3)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("hello", "stop", 0)
    assert reply.object == "text_completion"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 5)
    assert reply.usage.total_tokens == 9
    assert reply.usage.prompt_tokens_details.cached_tokens == 2  # type: ignore[union-attr]
    params = served.gateway.last_generate.params
    assert (params.max_tokens, params.temperature, params.seed) == (16, 1.0, 3)
    # BOS first, then the text with its special tokens recognised.
    assert served.gateway.last_parts == (Text(""), Text("say", special=True))
    assert served.gateway.sessions[-1].closed


async def test_completion_of_several_prompts_and_samples(served: Served) -> None:
    reply = await served.openai().completions.create(model="fake", prompt=["ab", "abcd"], n=2)
    assert [(c.index, c.text) for c in reply.choices] == [
        (0, "hello"),
        (1, "ello"),
        (2, "hello"),
        (3, "ello"),
    ]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3 + 5, 18)


@pytest.mark.parametrize(
    "prompt, parts", [([104, 105], [(104, 105)]), ([[104], [105, 106]], [(104,), (105, 106)])]
)
async def test_completion_of_token_ids(
    served: Served, prompt: Any, parts: list[tuple[int, ...]]
) -> None:
    reply = await served.openai().completions.create(
        model="fake", prompt=prompt, echo=True, max_tokens=1
    )
    appended = [op.parts for op in served.gateway.sessions[-1].ops if hasattr(op, "parts")]
    assert appended == [(Tokens(ids),) for ids in parts]
    assert [c.text for c in reply.choices] == [bytes(ids).decode() + "h" for ids in parts]


async def test_completion_logprobs_with_echo(served: Served) -> None:
    reply = await served.openai().completions.create(
        model="fake", prompt="ab", echo=True, logprobs=2, max_tokens=2
    )
    choice = reply.choices[0]
    assert choice.text == "abhe"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<s>", "a", "b", "h", "e"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    # BOS is not in the echoed text: it takes no place.
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[3] == {"h": -0.5, "i": -1.5}


async def test_completion_scores_a_prompt_only(served: Served) -> None:
    reply = await served.openai().completions.create(
        model="fake", prompt="ab", echo=True, logprobs=0, max_tokens=0
    )
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or ()) == 3
    assert choice.logprobs.top_logprobs is None


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_streamed_completion_equals_the_whole_one(
    served: Served, logprobs: int | None
) -> None:
    given: dict[str, Any] = {"model": "fake", "prompt": ["a", "b"], "n": 2, "echo": True}
    given["logprobs"] = logprobs
    whole = await served.openai().completions.create(**given)
    stream = await served.openai().completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    texts, tokens, offsets, finish = [""] * 4, [[], [], [], []], [[], [], [], []], [""] * 4  # type: ignore[var-annotated]
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
        finish[choice.index] = choice.finish_reason or finish[choice.index]
        assert chunk.usage is None
    assert texts == [c.text for c in whole.choices]
    assert finish == [c.finish_reason for c in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    if logprobs is not None:
        assert tokens == [c.logprobs.tokens for c in whole.choices]
        assert offsets == [c.logprobs.text_offset for c in whole.choices]


async def test_streamed_offsets_without_echo(served: Served) -> None:
    stream = await served.openai().completions.create(
        model="fake", prompt="a", logprobs=0, stream=True
    )
    offsets = [c.choices[0].logprobs.text_offset async for c in stream if c.choices[0].logprobs]
    assert offsets == [[0], [1], [2], [3], [4]]


async def test_chat(served: Served) -> None:
    reply = await served.openai().chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            },
        ],
        max_completion_tokens=3,
        user="me",
        metadata={"k": "v"},
        store=False,
        service_tier="auto",
    )
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "hel")
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert reply.usage is not None and reply.usage.completion_tokens == 3
    assert served.gateway.chat.last["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


async def test_chat_is_unlimited_by_default(served: Served) -> None:
    await served.openai().chat.completions.create(model="fake", messages=ASK)
    assert served.gateway.last_generate.params.max_tokens is None


async def test_chat_stream(served: Served) -> None:
    stream = await served.openai().chat.completions.create(
        model="fake",
        messages=ASK,
        n=2,
        stream=True,
        stop=["o"],
        stream_options={"include_usage": True},
    )
    texts, roles, finish = ["", ""], [0, 0], ["", ""]
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        if choice.delta.role:
            assert texts[choice.index] == "" and choice.delta.content == ""
            roles[choice.index] += 1
        texts[choice.index] += choice.delta.content or ""
        finish[choice.index] = choice.finish_reason or ""
    assert (texts, roles, finish) == (["hell", "ell"], [1, 1], ["stop", "stop"])
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 7


async def test_chat_logprobs(served: Served) -> None:
    given: dict[str, Any] = {"model": "fake", "messages": ASK, "logprobs": True, "top_logprobs": 2}
    reply = await served.openai().chat.completions.create(**given)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == list("hello")
    assert logprobs.content[0].bytes == [104]
    assert [(t.token, t.logprob) for t in logprobs.content[0].top_logprobs] == [
        ("h", -0.5),
        ("i", -1.5),
    ]
    stream = await served.openai().chat.completions.create(**given, stream=True)
    streamed = []
    async for chunk in stream:
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == logprobs.content


def _tool(name: str) -> Any:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


CALLS = (
    'Let me see.\n<tool_call>{"name":"add","arguments":{"a":1.50}}</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)


async def test_tool_calls(served: Served) -> None:
    served.gateway.script = lambda prompt, index: CALLS
    client = served.openai()
    given: dict[str, Any] = {
        "model": "fake",
        "messages": ASK,
        "tools": [_tool("add"), _tool("now")],
        "tool_choice": "auto",
    }
    choice = (await client.chat.completions.create(**given)).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert calls == [("add", '{"a":1.50}'), ("now", "{}")]
    assert served.gateway.last_generate.params.skip_special_tokens is False

    content, streamed, finish = "", [], None
    async for chunk in await client.chat.completions.create(**given, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        streamed += delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    assert (content.strip(), finish) == ("Let me see.", "tool_calls")
    assert [(c.index, c.function.name, c.function.arguments) for c in streamed] == [
        (0, *calls[0]),
        (1, *calls[1]),
    ]
    # The history goes back into the template, with the arguments decoded.
    message = choice.message
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}  # type: ignore[index]
    await client.chat.completions.create(
        model="fake",
        messages=[*ASK, message, answer],
        tools=given["tools"],  # type: ignore[list-item]
    )
    history = served.gateway.chat.last["messages"]
    assert history[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1.5}}
    assert history[2] == {
        "role": "tool",
        "content": "3",
        "tool_call_id": message.tool_calls[0].id,  # type: ignore[index]
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_tool_call(served: Served, stream: bool) -> None:
    served.gateway.script = lambda prompt, index: '{"name":"now","arguments":{"x":1}}'
    tools = [_tool("add"), _tool("now")]
    tools[0]["function"]["parameters"]["$defs"] = {"number": {"type": "number"}}
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        given: dict[str, Any] = {"messages": ASK, "tools": tools, "tool_choice": choice}
        reply = await served.openai().chat.completions.create(model="fake", stream=stream, **given)
        if stream:
            calls, finish = [], None
            async for chunk in reply:
                calls += chunk.choices[0].delta.tool_calls or []
                assert not chunk.choices[0].delta.content
                finish = chunk.choices[0].finish_reason or finish
        else:
            calls, finish = reply.choices[0].message.tool_calls, reply.choices[0].finish_reason
        assert [(c.function.name, c.function.arguments) for c in calls] == [("now", '{"x":1}')]
        assert finish == "tool_calls"
        assert served.gateway.last_parts[-1] == Text("<tool_call>", special=True)
        constraint = served.gateway.last_generate.constraint
        assert constraint is not None and constraint.kind == "json_schema"
        schema = json.loads(constraint.source)
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid({"name": "now", "arguments": {}})
        assert validator.is_valid({"name": "add", "arguments": {}}) == (choice == "required")
        assert not validator.is_valid({"name": "now"})


async def test_without_tools_nothing_is_parsed(served: Served) -> None:
    served.gateway.script = lambda prompt, index: CALLS
    client = served.openai()
    reply = await client.chat.completions.create(
        model="fake", messages=ASK, tools=[_tool("add")], tool_choice="none"
    )
    assert reply.choices[0].message.content == CALLS
    assert served.gateway.chat.last["tools"] is None


@pytest.mark.parametrize(
    "given, kind, source",
    [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "integer"}, "strict": True},
                }
            },
            "json_schema",
            '{"type":"integer"}',
        ),
        ({"extra_body": {"regex": "a+"}}, "regex", "a+"),
        ({"extra_body": {"guided_choice": ["a", "b"]}}, "choices", '["a","b"]'),
        ({"extra_body": {"guided_json": {"type": "null"}}}, "json_schema", '{"type":"null"}'),
        ({"extra_body": {"ebnf": "root ::= 'x'"}}, "ebnf", "root ::= 'x'"),
        ({"extra_body": {"structured_outputs": {"regex": "b"}}}, "regex", "b"),
    ],
)
async def test_constraints(
    served: Served, given: dict[str, Any], kind: str | None, source: str
) -> None:
    await served.openai().chat.completions.create(model="fake", messages=ASK, **given)
    constraint = served.gateway.last_generate.constraint
    if kind is None:
        assert constraint is None
    else:
        assert constraint is not None
        assert (constraint.kind, constraint.source) == (kind, source)


async def test_extras(served: Served) -> None:
    await served.openai().completions.create(
        model="fake",
        prompt="x",
        logit_bias={"5": -3},
        presence_penalty=0.5,
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "skip_special_tokens": False,
            "cache_salt": "tenant",
        },
    )
    params = served.gateway.last_generate.params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (7, 0.1, 1.2)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, (3,))
    assert (params.skip_special_tokens, params.logit_bias) == (False, {5: -3.0})
    assert served.gateway.sessions[-1].ops[0].namespace == "tenant"  # type: ignore[union-attr]


async def test_models(served: Served) -> None:
    models = (await served.openai().models.list()).data
    assert [model.id for model in models] == ["fake"]
    assert (await served.openai().models.retrieve("fake")).owned_by == "rootlace"
    with pytest.raises(openai.NotFoundError):
        await served.openai().models.retrieve("org/other")


async def test_the_synchronous_client(served: Served) -> None:
    def work() -> tuple[str | None, str]:
        client = served.sync_openai()
        reply = client.chat.completions.create(model="fake", messages=ASK)  # type: ignore[arg-type]
        stream = client.completions.create(model="fake", prompt="x", stream=True)
        return reply.choices[0].message.content, "".join(c.choices[0].text for c in stream)

    assert await asyncio.to_thread(work) == ("hello", "hello")


@pytest.mark.parametrize(
    "given, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"user": 3}, "user"),
        ({"metadata": "m"}, "metadata"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice",
        ),
        ({"tool_choice": "required", "tools": [TOOL], "regex": "a"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
async def test_bad_chat_parameters(served: Served, given: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "messages": ASK, **given}
    async with served.http.post("/v1/chat/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param and error["message"]
    assert not served.gateway.sessions  # nothing was started


@pytest.mark.parametrize(
    "given, param",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [VALUE := 999]}, "prompt"),
        ({"prompt": [[1], [VALUE]]}, "prompt[1]"),
        ({"prompt": 3}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "logprobs": 999}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
async def test_bad_completion_parameters(served: Served, given: dict[str, Any], param: str) -> None:
    async with served.http.post("/v1/completions", json=given) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, param)


async def test_errors_as_the_client_sees_them(served: Served) -> None:
    client = served.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="fake", prompt="boom")
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="prompt 1: the prompt is too long"):
        await client.completions.create(model="fake", prompt=["x", "boom", "y"])
    with pytest.raises(openai.BadRequestError, match="template refuses"):
        await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "refuse me"}]
        )
    # Before the first event a stream has a status like any other reply.
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="fake", prompt="boom", stream=True)
    assert all(session.closed for session in served.gateway.sessions)


@pytest.mark.parametrize(
    "failure, status",
    [(Overloaded("full"), 429), (ServerUnavailable("gone"), 503), (InternalError("oh"), 500)],
)
async def test_failures_of_the_runtime(served: Served, failure: Any, status: int) -> None:
    served.gateway.fail = failure
    body = {"model": "fake", "prompt": "x"}
    async with served.http.post("/v1/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"], error["message"]) == (
        status,
        failure.code,
        str(failure),
    )
    assert ("Retry-After" in reply.headers) == (status == 429)


async def test_an_error_in_mid_stream_is_an_event(served: Served) -> None:
    def script(prompt: str, index: int) -> Any:
        yield "h"
        served.gateway.sessions[-1]._on_events([_failed()])
        yield "i"

    served.gateway.script = script
    stream = await served.openai().completions.create(model="fake", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="engine fell over"):
        async for _ in stream:
            pass


def _failed() -> Any:
    from rootlace.wire.protocol import Failed

    return Failed(3, "internal", "the engine fell over")


async def test_malformed_bodies(served: Served) -> None:
    for body in (b"", b"{", b"\xff\xfe", b"[1]", b'"x"', b"[" * 100_000, b"null"):
        async with served.http.post("/v1/completions", data=body) as reply:
            assert reply.status == 400, body[:10]
            assert "message" in json.loads(await reply.read())["error"]
