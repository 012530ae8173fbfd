"""OpenAI's own client: chat, tools, parsed values, responses, completions and embeddings."""

from __future__ import annotations

import json
import math
from typing import Any

import pydantic
import pytest

openai = pytest.importorskip("openai", reason="needs the extra `clients`")

ASK: list[Any] = [{"role": "user", "content": "Who are you?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 12}},
    "required": ["expression"],
    "additionalProperties": False,
}
FUNCTION = {"name": "calculator", "description": "Computes.", "parameters": PARAMETERS}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    large: bool


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: Any) -> None:
    given = {"model": "demo", "messages": ASK, "temperature": 0, "max_completion_tokens": 24}
    text = client.chat.completions.create(**given).choices[0].message.content
    assert "Rootlace" in text
    pieces = [
        c.choices[0].delta.content for c in client.chat.completions.create(**given, stream=True)
    ]
    assert "".join(filter(None, pieces)) == text


def test_calls_stream_as_they_are_written(client: Any) -> None:
    given = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "temperature": 0,
    }
    (call,) = client.chat.completions.create(**given).choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"expression"}
    with client.chat.completions.stream(**given) as stream:
        deltas = [e.arguments_delta for e in stream if e.type.endswith("arguments.delta")]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert len(deltas) > 1
    assert streamed.function.arguments == call.function.arguments == "".join(deltas)


def test_parsed_values(client: Any) -> None:
    chat = client.chat.completions.parse(
        model="demo", messages=ASK, response_format=City, temperature=0
    )
    response = client.responses.parse(model="demo", input=ASK, text_format=City, temperature=0)
    assert isinstance(chat.choices[0].message.parsed, City)
    assert response.output_parsed == chat.choices[0].message.parsed


class Calculation(pydantic.BaseModel):
    expression: str = pydantic.Field(max_length=12)


def test_what_was_parsed_is_sent_back(client: Any) -> None:
    """The loop of tools in OpenAI's guide: the parsed message is sent back unchanged."""
    tool = openai.pydantic_function_tool(Calculation, name="calculator")
    given = {"model": "demo", "temperature": 0, "max_completion_tokens": 64}
    messages: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
    first = client.chat.completions.parse(
        **given, messages=messages, tools=[tool], tool_choice="required"
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Calculation)
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        second = client.chat.completions.parse(
            **given,
            messages=[*messages, sent, result],
            tools=[tool],
            tool_choice="none",
            response_format=City,
        )
        assert isinstance(second.choices[0].message.parsed, City)
        sent = second.choices[0].message
        third = client.chat.completions.create(
            **given, messages=[*messages, sent, *ASK], response_format={"type": "text"}
        )
        assert third.choices[0].finish_reason == "stop"


def test_items_that_were_parsed_are_sent_back(client: Any) -> None:
    tool = openai.pydantic_function_tool(Calculation, name="calculator")["function"]
    given = {"model": "demo", "temperature": 0, "max_output_tokens": 64}
    given["tools"] = [{"type": "function", **tool}]
    items: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
    first = client.responses.parse(**given, input=items, tool_choice="required")
    (call,) = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    for output in (first.output, first.model_dump()["output"]):
        items = [items[0], *output, result]
        second = client.responses.parse(**given, input=items, tool_choice="none", text_format=City)
        assert isinstance(second.output_parsed, City)
        items += [*second.model_dump()["output"], {"role": "user", "content": "Thanks."}]
        assert client.responses.create(**given, input=items).status == "completed"


def test_responses(client: Any) -> None:
    first = client.responses.create(model="demo", input="Who are you?", temperature=0)
    assert "Rootlace" in first.output_text
    with client.responses.stream(model="demo", input="Who are you?", temperature=0) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == first.output_text
    second = client.responses.create(
        model="demo", input="Hello", previous_response_id=first.id, temperature=0
    )
    # The tree holds the first response's branch, its answer included.
    answered = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= answered - 1


def test_completions_and_embeddings(client: Any) -> None:
    reply = client.completions.create(
        model="demo", prompt="a b", max_tokens=2, logprobs=1, echo=True
    )
    assert reply.choices[0].logprobs.tokens[:2] == ["a", " b"]
    vectors = client.embeddings.create(model="demo", input=["one", "two"], dimensions=8)
    assert [len(one.embedding) for one in vectors.data] == [8, 8]


def test_scores_are_the_models_probabilities(client: Any, url: str) -> None:
    prompt = "Who are"
    asked = {
        "text": prompt,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 4,
    }
    meta = client.post(f"{url}/generate", body=asked, cast_to=object)["meta_info"]
    (likely,) = meta["output_top_logprobs"]
    given = {"query": prompt, "items": [""], "label_token_ids": [label for _, label, _ in likely]}
    (scores,) = client.post("/score", body=given, cast_to=object)["scores"]
    assert scores == pytest.approx([math.exp(one) for one, _, _ in likely], rel=1e-3)
    ranked = client.post(
        "/rerank", body={"query": "capital", "documents": ["a", "b"]}, cast_to=object
    )
    assert sorted(result["index"] for result in ranked["results"]) == [0, 1]
