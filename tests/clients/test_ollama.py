"""Ollama's own client."""

from __future__ import annotations

from typing import Any

import pytest

ollama = pytest.importorskip("ollama", reason="needs the extra `clients`")

ASK = [{"role": "user", "content": "Who are you?"}]
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture
def client(url: str) -> Any:
    return ollama.Client(host=url)


def test_chat_and_generate(client: Any) -> None:
    given = {"model": "demo", "options": GREEDY}
    whole = client.chat(messages=ASK, **given)
    assert "Rootlace" in whole.message.content and whole.eval_count > 0
    pieces = client.chat(messages=ASK, stream=True, **given)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert client.generate(prompt="Who are you?", **given).response == whole.message.content
    scored = client.chat(messages=ASK, logprobs=True, top_logprobs=2, **given)
    assert "".join(one.token for one in scored.logprobs).startswith(whole.message.content)
    assert {len(one.top_logprobs) for one in scored.logprobs} == {2}


def test_tools_and_what_is_served(client: Any) -> None:
    def calculator(expression: str) -> str:
        """Computes.

        Args:
            expression: what to compute
        """
        return expression

    ask = [{"role": "user", "content": "What is 12 + 30?"}]
    reply = client.chat(model="demo", messages=ask, tools=[calculator], options=GREEDY)
    (call,) = reply.message.tool_calls
    assert call.function.name == "calculator" and "12" in call.function.arguments["expression"]
    for sent in (reply.message, reply.message.model_dump()):
        messages = [*ask, sent, {"role": "tool", "tool_name": "calculator", "content": "42"}]
        assert client.chat(model="demo", messages=messages, options=GREEDY).message.content
    assert [model.model for model in client.list().models] == ["demo"]
    assert "tools" in client.show("demo").capabilities
    assert len(client.embed(model="demo", input=["a", "b"]).embeddings) == 2
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat(model="other", messages=ask)
