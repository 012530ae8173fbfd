"""OpenAI's chat completions, models and extras, through the real `openai` client."""

import json
from collections import defaultdict
from typing import Any

import jsonschema
import openai
import pytest

from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.wire.protocol import Text
from tests.server.http.conftest import Served
from tests.server.test_tagged_arguments import FORMS, SOURCES, written

ASK = [{"role": "user", "content": "hi"}]


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
    assert served.model.chat.last["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


async def test_prediction(served: Served) -> None:
    """The prediction reaches the engine as text, for all samples; usage has its accepted tokens."""
    for content in ("a draft", [{"type": "text", "text": "a "}, {"type": "text", "text": "draft"}]):
        reply = await served.openai().chat.completions.create(
            model="fake",
            messages=ASK,
            n=2,
            prediction={"type": "content", "content": content},  # type: ignore[typeddict-item]
        )
        assert served.model.last_generate.prediction == "a draft"
        assert reply.usage is not None
        details = reply.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (7, 2)
    plain = await served.openai().chat.completions.create(model="fake", messages=ASK)
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None


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


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("given", [{"messages": ASK}, {"prompt": ["a", "b"]}])
async def test_usage_so_far(served: Served, given: dict[str, Any], logprobs: int | None) -> None:
    """Each chunk has the usage of its choice so far, which ends at the whole answer's usage."""
    client, extra = served.openai(), {"continuous_usage_stats": True}
    create: Any = client.completions.create
    if "messages" in given:
        create, logprobs = client.chat.completions.create, None if logprobs is None else True
    whole = await create(model="fake", n=2, stop=["o"], logprobs=logprobs, **given)
    options = {"include_usage": True, **extra}
    stream = await create(
        model="fake",
        n=2,
        stop=["o"],
        logprobs=logprobs,
        stream=True,
        stream_options=options,
        **given,
    )
    *chunks, last = [chunk async for chunk in stream]
    counts: dict[int, list[int]] = defaultdict(list)
    prompts: dict[int, set[int]] = defaultdict(set)
    for chunk in chunks:
        (choice,) = chunk.choices
        counts[choice.index].append(chunk.usage.completion_tokens)
        prompts[choice.index].add(chunk.usage.prompt_tokens)
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + counts[choice.index][-1]
    assert sorted(counts) == [choice.index for choice in whole.choices]
    assert all(each == sorted(each) for each in counts.values())
    assert last.usage == whole.usage
    assert sum(each[-1] for each in counts.values()) == whole.usage.completion_tokens
    of_prompts = [min(prompts[index]) for index in range(0, len(counts), 2)]
    assert all(len(each) == 1 for each in prompts.values())
    assert sum(of_prompts) == whole.usage.prompt_tokens
    plain = await create(model="fake", stream=True, stream_options=extra, **given)
    assert not any([chunk.usage async for chunk in plain]), "it goes with include_usage"


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


def _joined(pieces: list[Any]) -> list[tuple[str, str]]:
    """Join the streamed pieces of calls: id and name come once, arguments in pieces."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.index == len(calls):
            assert piece.id and piece.type == "function"
            calls.append((piece.function.name, ""))
        else:
            assert piece.id is None and piece.function.name is None
        name, arguments = calls[piece.index]
        calls[piece.index] = (name, arguments + piece.function.arguments)
    return calls


CALLS = (
    'Let me see.\n<tool_call>{"name":"add","arguments":{"a":1.50}}</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)


async def test_tool_calls(served: Served) -> None:
    served.model.script = lambda prompt, index: CALLS
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
    assert served.model.last_generate.params.skip_special_tokens is False

    content, streamed, finish = "", [], None
    async for chunk in await client.chat.completions.create(**given, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        streamed += delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    assert (content.strip(), finish) == ("Let me see.", "tool_calls")
    assert _joined(streamed) == calls
    assert len([c for c in streamed if c.index == 0]) > 8  # streamed while they are written
    # The history goes back into the template, with the arguments decoded.
    message = choice.message
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}  # type: ignore[index]
    await client.chat.completions.create(
        model="fake",
        messages=[*ASK, message, answer],
        tools=given["tools"],  # type: ignore[list-item]
    )
    history = served.model.chat.last["messages"]
    assert history[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1.5}}
    assert history[2] == {
        "role": "tool",
        "content": "3",
        "tool_call_id": message.tool_calls[0].id,  # type: ignore[index]
    }


@pytest.mark.parametrize("name", sorted(SOURCES))
async def test_arguments_in_tags(served: Served, name: str) -> None:
    """Whole and streamed, the tagged arguments of Qwen3-Coder and GLM 4.5 become JSON, and go back
    into the template in tags."""
    model, form = served.model, FORMS[name]
    model.chat = ChatTemplate(SOURCES[name])  # type: ignore[assignment]
    text = 'a "long" text of </tool_call>s'
    marked = f"<![CDATA[{text}]]>" if form.argument.cdata else text
    called = written(form, "add", ("text", marked), ("a", "1.50"))
    prompts: list[str] = []

    def script(prompt: str, index: int) -> str:
        prompts.append(prompt)
        return f"Let me see.\n{called}"

    model.script = script
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "a": {"type": "number"}},
        "required": ["text"],
    }
    add = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    client = served.openai()
    given: dict[str, Any] = {"model": "fake", "messages": ASK, "tools": [add, _tool("now")]}
    choice = (await client.chat.completions.create(**given)).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    arguments = f'{{"text": {json.dumps(text)}, "a": 1.50}}'
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert calls == [("add", arguments)]

    streamed = []
    async for chunk in await client.chat.completions.create(**given, stream=True):
        streamed += chunk.choices[0].delta.tool_calls or []
    assert _joined(streamed) == calls
    assert len(streamed) > len(text) or marked != text  # streamed while it is written

    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}  # type: ignore[index]
    given["messages"] = [*ASK, choice.message, result]
    await client.chat.completions.create(**given)
    assert called.replace("1.50", "1.5") in prompts[-1]

    await client.chat.completions.create(**given, tool_choice="required")
    constraint = model.last_generate.constraint
    assert constraint is not None and constraint.kind == "structural_tag"
    assert prompts[-1] == prompts[-2]  # no call is begun for the model
    strict = {"name": "add", "strict": True, "parameters": {**parameters, "minProperties": 1}}
    given["tools"] = [{"type": "function", "function": strict}]
    with pytest.raises(openai.BadRequestError, match="tool 'add': json_schema: #/minProperties"):
        await client.chat.completions.create(**given)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_tool_call(served: Served, stream: bool) -> None:
    served.model.script = lambda prompt, index: '{"name":"now","arguments":{"x":1}}'
    tools = [_tool("add"), _tool("now")]
    tools[0]["function"]["parameters"]["$defs"] = {"number": {"type": "number"}}
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        given: dict[str, Any] = {"messages": ASK, "tools": tools, "tool_choice": choice}
        reply = await served.openai().chat.completions.create(model="fake", stream=stream, **given)
        if stream:
            pieces, finish = [], None
            async for chunk in reply:
                pieces += chunk.choices[0].delta.tool_calls or []
                assert not chunk.choices[0].delta.content
                finish = chunk.choices[0].finish_reason or finish
            calls = _joined(pieces)
        else:
            made, finish = reply.choices[0].message.tool_calls, reply.choices[0].finish_reason
            calls = [(c.function.name, c.function.arguments) for c in made]
        assert calls == [("now", '{"x":1}')]
        assert finish == "tool_calls"
        assert served.model.last_parts[-1] == Text("<tool_call>\n", special=True)
        constraint = served.model.last_generate.constraint
        assert constraint is not None and constraint.kind == "json_schema"
        schema = json.loads(constraint.source)
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid({"name": "now", "arguments": {}})
        assert validator.is_valid({"name": "add", "arguments": {}}) == (choice == "required")
        assert not validator.is_valid({"name": "now"})


async def test_parallel_tool_calls(served: Served) -> None:
    """A client may ask for one call at most; several calls can be forced."""
    served.model.script = lambda prompt, index: CALLS
    given: dict[str, Any] = {"model": "fake", "messages": ASK, "tools": [_tool("add")]}
    client = served.openai()
    reply = await client.chat.completions.create(**given, parallel_tool_calls=False)
    assert [c.function.name for c in reply.choices[0].message.tool_calls or ()] == ["add"]
    await client.chat.completions.create(**given, tool_choice="required", parallel_tool_calls=True)
    constraint = served.model.last_generate.constraint
    assert constraint is not None and constraint.kind == "structural_tag"
    _, calls, _ = json.loads(constraint.source)["format"]["elements"]
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, False)
    assert [tag["begin"][:11] for tag in calls["tags"]] == ["<tool_call>"]


async def test_a_call_that_a_stop_string_cut_is_no_call_to_make(served: Served) -> None:
    served.model.script = lambda prompt, index: (
        '<tool_call>{"name":"add","arguments":{"city":"Oslo"}}</tool_call>'
    )
    client = served.openai()
    given: dict[str, Any] = {"model": "fake", "messages": ASK, "tools": [_tool("add")]}
    for stop, reason, arguments in (
        ("O", "stop", '{"city":"'),
        ("/", "tool_calls", '{"city":"Oslo"}'),  # behind the arguments
    ):
        choice = (await client.chat.completions.create(**given, stop=stop)).choices[0]
        (call,) = choice.message.tool_calls or ()
        assert (call.function.arguments, choice.finish_reason) == (arguments, reason)  # type: ignore[union-attr]
        stream = await client.chat.completions.create(**given, stop=stop, stream=True)
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == reason


async def test_a_tool_without_parameters_has_no_arguments(served: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    await served.openai().chat.completions.create(model="fake", messages=ASK, tools=tools)  # type: ignore[arg-type]
    (told,) = served.model.chat.last["tools"]
    assert told["function"]["parameters"] == {"type": "object", "properties": {}}
    given: dict[str, Any] = {"model": "fake", "messages": ASK, "tools": tools}
    await served.openai().chat.completions.create(**given, tool_choice="required")
    constraint = served.model.last_generate.constraint
    assert constraint is not None
    validator = jsonschema.Draft202012Validator(json.loads(constraint.source))
    assert validator.is_valid({"name": "now", "arguments": {}})
    assert not validator.is_valid({"name": "now", "arguments": {"x": 1}})


async def test_thoughts_are_told_apart(served: Served) -> None:
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: "<think>\nhm\n</think>\n\nyes"
    client = served.openai()
    given: dict[str, Any] = {"model": "fake", "messages": ASK}
    reply = await client.chat.completions.create(**given)
    message: Any = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")
    details = reply.usage.completion_tokens_details if reply.usage else None
    assert details is not None and details.reasoning_tokens == 2  # a token is a byte here
    response = await client.responses.create(model="fake", input="x")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    thoughts = said = ""
    async for chunk in await client.chat.completions.create(**given, stream=True):
        delta: Any = chunk.choices[0].delta
        thoughts += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
    assert (thoughts, said) == ("hm", "yes")
    extra = {"separate_reasoning": False}
    message = (await client.chat.completions.create(**given, extra_body=extra)).choices[0].message
    assert message.content == "<think>\nhm\n</think>\n\nyes"
    extra = {"include_reasoning": False, "thinking": {"type": "disabled"}}  # type: ignore[dict-item]
    message = (await client.chat.completions.create(**given, extra_body=extra)).choices[0].message
    assert message.content == "yes" and not hasattr(message, "reasoning_content")
    assert {"thinking": False, "enable_thinking": False} in served.model.chat.told


async def test_without_tools_nothing_is_parsed(served: Served) -> None:
    served.model.script = lambda prompt, index: CALLS
    client = served.openai()
    reply = await client.chat.completions.create(
        model="fake", messages=ASK, tools=[_tool("add")], tool_choice="none"
    )
    assert reply.choices[0].message.content == CALLS
    assert served.model.chat.last["tools"] is None


async def test_models(served: Served) -> None:
    models = (await served.openai().models.list()).data
    assert [model.id for model in models] == ["fake"]
    assert (await served.openai().models.retrieve("fake")).owned_by == "rootlace"
    with pytest.raises(openai.NotFoundError):
        await served.openai().models.retrieve("org/other")
