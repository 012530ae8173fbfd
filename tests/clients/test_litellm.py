"""litellm: one server by the interfaces of four providers, and errors as its own."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

litellm = pytest.importorskip("litellm", reason="needs the extra `clients-all`")

ASK = [{"role": "user", "content": "Who are you?"}]
SUM = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "api_key": "none"}
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    large: bool


@pytest.mark.parametrize(
    "model, path",
    [
        ("openai/demo", "/v1"),
        ("hosted_vllm/demo", "/v1"),
        ("anthropic/demo", ""),
        ("ollama_chat/demo", ""),
    ],
)
def test_chat_by_each_interface(url: str, model: str, path: str) -> None:
    given = {"model": model, "api_base": url + path, "messages": ASK, **GREEDY}
    whole = litellm.completion(**given).choices[0].message.content
    assert "Rootlace" in whole
    pieces = [chunk.choices[0].delta.content for chunk in litellm.completion(**given, stream=True)]
    assert "".join(filter(None, pieces)) == whole


def test_calls_and_formats(url: str) -> None:
    given: dict[str, Any] = {"model": "openai/demo", "api_base": f"{url}/v1", **GREEDY}
    message = litellm.completion(messages=SUM, tools=[TOOL], **given).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["calculator"]
    form = litellm.completion(messages=ASK, response_format=City, **given | {"max_tokens": 60})
    City.model_validate_json(form.choices[0].message.content)
    vectors = litellm.embedding("openai/demo", ["a", "b"], api_base=f"{url}/v1", api_key="none")
    assert len(vectors.data) == 2
    ranked = litellm.rerank(
        "hosted_vllm/demo", "x", ["a", "b"], api_base=f"{url}/v1", api_key="none"
    )
    assert sorted(one["index"] for one in ranked.results) == [0, 1]


def test_errors_are_the_clients_own(url: str) -> None:
    given: dict[str, Any] = {"api_base": f"{url}/v1", "max_retries": 0, **GREEDY}
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion("openai/other", ASK, **given)
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/demo", long, **given)
