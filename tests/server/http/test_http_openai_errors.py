"""Errors of OpenAI's endpoints, as the real `openai` client sees them."""

import json
from typing import Any

import openai
import pytest

from rootlace.wire.errors import (
    ClientSuspended,
    DeadlineExceeded,
    EndsEngine,
    InternalError,
    Overloaded,
    ServerUnavailable,
)
from tests.server.http.conftest import Served

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "given, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_p": -0.1}, "top_p"),
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
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "tokens", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0]",
        ),
        ({"prediction": {"type": "content", "content": "a" * (2**20 + 1)}}, "prediction.content"),
    ],
)
async def test_bad_chat_parameters(served: Served, given: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "messages": ASK, **given}
    async with served.http.post("/v1/chat/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param and error["message"]
    assert not served.model.sessions  # no request was started


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
    with pytest.raises(openai.BadRequestError, match="template refuses") as refused:
        await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "refuse me"}]
        )
    assert refused.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="template refuses") as refused:
        await client.responses.create(model="fake", input="refuse me")
    assert refused.value.param == "input"
    # Before the first event a stream has a status like any other reply.
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="fake", prompt="boom", stream=True)
    assert all(session.closed for session in served.model.sessions)


@pytest.mark.parametrize(
    "failure, status",
    [(Overloaded("full"), 429), (ServerUnavailable("gone"), 503), (InternalError("oh"), 500)],
)
async def test_failures_of_the_runtime(served: Served, failure: Any, status: int) -> None:
    served.model.fail = failure
    body = {"model": "fake", "prompt": "x"}
    async with served.http.post("/v1/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"], error["message"]) == (
        status,
        failure.code,
        str(failure),
    )
    assert ("Retry-After" in reply.headers) == (status in (429, 503))


@pytest.mark.parametrize(
    "failure, sent",
    [
        (DeadlineExceeded.after(1), 1),
        (ClientSuspended("wait"), 1),
        (EndsEngine("the engine died twice"), 1),
        (InternalError("oh"), 2),
    ],
)
async def test_what_ends_in_the_same_way_is_not_sent_again(
    served: Served, failure: Any, sent: int
) -> None:
    """Clients repeat 408, 429 and 5xx unless the reply says not to."""
    served.model.fail = failure
    client = served.openai().with_options(max_retries=1)
    with pytest.raises(openai.APIStatusError):
        await client.completions.create(model="fake", prompt="x")
    assert len(served.model.sessions) == sent


async def test_malformed_bodies(served: Served) -> None:
    for body in (b"", b"{", b"\xff\xfe", b"[1]", b'"x"', b"[" * 100_000, b"null"):
        async with served.http.post("/v1/completions", data=body) as reply:
            assert reply.status == 400, body[:10]
            assert "message" in json.loads(await reply.read())["error"]
