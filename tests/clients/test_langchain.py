"""langchain-openai: chat models by both of OpenAI's interfaces, tools and structured answers."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

langchain = pytest.importorskip("langchain_openai", reason="needs the extra `clients-all`")
tools = pytest.importorskip("langchain_core.tools")


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(max_length=12)
    large: bool


@pytest.fixture
def given(url: str) -> dict[str, Any]:
    return {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "model": "demo",
        "temperature": 0,
        "max_retries": 0,
    }


@pytest.mark.parametrize("responses", [False, True])
def test_a_chat_model(given: dict[str, Any], responses: bool) -> None:
    @tools.tool
    def calculator(expression: str) -> str:
        """Computes."""
        return "42"

    model = langchain.ChatOpenAI(**given, max_tokens=60, use_responses_api=responses)
    whole = model.invoke("Who are you?").text
    assert "Rootlace" in whole
    assert "".join(chunk.text for chunk in model.stream("Who are you?")) == whole
    able = model.bind_tools([calculator])
    turn = able.invoke("What is 12 + 30?")
    (call,) = turn.tool_calls
    assert call["name"] == "calculator"
    answer = able.invoke([("user", "What is 12 + 30?"), turn, calculator.invoke(call)])
    assert "42" in answer.text and not answer.tool_calls
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(City, method=method)
        assert isinstance(structured.invoke("Paris"), City)


def test_a_cut_call_is_none(given: dict[str, Any]) -> None:
    """LangChain makes a call with half its arguments from a streamed one that was cut.

    `findings/cut_calls_that_run.sh` shows it.
    """

    @tools.tool
    def calculator(expression: str) -> str:
        """Computes."""
        return "42"

    model = langchain.ChatOpenAI(**given, max_tokens=12, disable_streaming="tool_calling")
    (turn,) = model.bind_tools([calculator], tool_choice="any").stream("What is 12 + 30?")
    assert turn.response_metadata["finish_reason"] == "length"
    assert not turn.tool_calls and turn.invalid_tool_calls


def test_completions_and_embeddings(given: dict[str, Any]) -> None:
    assert len(langchain.OpenAI(**given, max_tokens=4).batch(["a", "b"])) == 2
    # LangChain would count tokens by OpenAI's vocabulary, not the model's.
    endpoint = {name: given[name] for name in ("base_url", "api_key", "model")}
    vectors = langchain.OpenAIEmbeddings(**endpoint, check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a", "b"])) == 2
