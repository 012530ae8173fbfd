"""Hugging Face's `InferenceClient`, which speaks TGI's dialect of OpenAI's interface."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

ASK = [{"role": "user", "content": "Who are you?"}]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}


@pytest.fixture
def client(url: str) -> InferenceClient:
    return InferenceClient(base_url=f"{url}/v1", api_key="none")


def test_chat(client: InferenceClient) -> None:
    given: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 24}
    (choice,) = client.chat_completion(ASK, logprobs=True, top_logprobs=2, **given).choices
    text = choice.message.content
    assert "Rootlace" in text and len(choice.logprobs.content[0].top_logprobs) == 2
    pieces = client.chat_completion(ASK, stream=True, **given)
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == text
    with pytest.raises(HfHubHTTPError, match="does not exist"):
        client.chat_completion(ASK, model="other")


def test_a_call(client: InferenceClient) -> None:
    function = {"name": "visit", "description": "Visits a city.", "parameters": CITY}
    given: dict[str, Any] = {"model": "demo", "tools": [{"type": "function", "function": function}]}
    reply = client.chat_completion(ASK, tool_choice="required", temperature=0, **given)
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"name", "large"}


def test_a_schema_is_held_as_the_client_sends_it(client: InferenceClient) -> None:
    """The client sends `{"type": "json_object", "value": ...}` for every format."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    reply = client.chat_completion(ASK, model="demo", response_format=form, temperature=0)
    assert json.loads(reply.choices[0].message.content).keys() == {"name", "large"}
