"""Anthropic's own client."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

SUM = {
    "name": "calculator",
    "description": "Computes a sum.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Import anthropic only in the worker that runs these tests: the import takes three seconds."""
    return pytest.importorskip("anthropic", reason="needs the extra `clients`")


@pytest.fixture
def client(anthropic: Any, url: str) -> Any:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


GREEDY = {"extra_body": {"temperature": 0}}  # the client has no such parameter


def ask(**more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Who are you?"}
    return {"model": "demo", "max_tokens": 24, "messages": [message], **GREEDY, **more}


def test_a_message_and_its_stream(client: Any) -> None:
    whole = client.messages.create(**ask(system="You are a helpful assistant."))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "demo")
    assert whole.content[0].type == "text" and whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**ask(system="You are a helpful assistant.")) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_input_tokens > 0  # the prompt was sent before


def test_stop_sequences(client: Any) -> None:
    whole = client.messages.create(**ask())
    stop = whole.content[0].text.split()[-1]
    cut = client.messages.create(**ask(stop_sequences=[stop]))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_counted_tokens_are_the_prompts(client: Any) -> None:
    marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    given = ask(system=[marked])
    counted = client.messages.count_tokens(
        model="demo", messages=given["messages"], system=given["system"]
    )
    usage = client.messages.create(**given).usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted.input_tokens == total
    again = client.messages.create(**given).usage
    assert again.cache_read_input_tokens > again.cache_creation_input_tokens


def test_a_tool_is_called(client: Any) -> None:
    given = ask(tools=[SUM], tool_choice={"type": "tool", "name": "calculator"}, max_tokens=64)
    message = client.messages.create(**given)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert call.name == "calculator" and isinstance(call.input["expression"], str)
    with client.messages.stream(**given) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert len(pieces) > 1  # streamed while it is written
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
    answer = client.messages.create(
        **{
            **given,
            "tool_choice": {"type": "none"},  # otherwise the model may call again
            "messages": [
                *given["messages"],
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ],
        }
    )
    (said,) = answer.content
    assert said.type == "text" and said.text and answer.stop_reason == "end_turn"


def test_errors_are_the_clients_own(anthropic: Any, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ask(model="claude"))
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**ask(extra_body={"temperature": -1}))
    assert wrong.value.type == "invalid_request_error"
    assert client.models.list().data[0].id == "demo"


class Fact(pydantic.BaseModel):
    name: Literal["Rootlace", "another"]


def test_what_was_parsed_is_sent_back(client: Any) -> None:
    first = client.messages.parse(**ask(), output_format=Fact)
    assert isinstance(first.parsed_output, Fact)
    for content in (first.content, first.model_dump()["content"]):
        given = ask()
        messages = [*given["messages"], {"role": "assistant", "content": content}]
        given["messages"] = [*messages, *given["messages"]]
        assert client.messages.create(**given).stop_reason == "end_turn"
