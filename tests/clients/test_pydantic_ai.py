"""pydantic-ai: agents with tools and typed answers, by chat completions and by responses."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

GREEDY = {"temperature": 0, "max_tokens": 60}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    large: bool


@pytest.fixture(scope="module")
def pydantic_ai() -> Any:
    """Import pydantic-ai only in the worker that runs these tests: the import takes a second."""
    return pytest.importorskip("pydantic_ai", reason="needs the extra `clients`")


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, pydantic_ai: Any, url: str) -> Any:
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return getattr(models, request.param)("demo", provider=provider)


async def test_an_agent_calls_its_tool(pydantic_ai: Any, model: Any) -> None:
    agent = pydantic_ai.Agent(model, model_settings=GREEDY)
    asked = []

    @agent.tool_plain
    def calculator(expression: str) -> str:
        """Computes."""
        asked.append(expression)
        return "42"

    result = await agent.run("What is 12 + 30?")
    assert asked == ["12+30"] and "42" in result.output
    assert result.usage.requests == 2 and result.usage.tool_calls == 1
    async with agent.run_stream("Who are you?") as stream:
        text = "".join([piece async for piece in stream.stream_text(delta=True)])
    assert "Rootlace" in text


async def test_answers_are_of_the_type_that_is_asked_for(pydantic_ai: Any, model: Any) -> None:
    for form in (pydantic_ai.ToolOutput(City), pydantic_ai.NativeOutput(City)):
        agent = pydantic_ai.Agent(model, output_type=form, model_settings=GREEDY)
        assert isinstance((await agent.run("Paris")).output, City)
