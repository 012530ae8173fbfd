"""OpenAI's agents: tools, typed answers and streams, by responses and by chat completions."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

agents = pytest.importorskip("agents", reason="needs the extra `clients-all`")


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    large: bool


@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def test_agents(url: str, kind: str) -> None:
    agents.set_tracing_disabled(True)  # traces would go to OpenAI
    asked = []

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Computes."""
        asked.append(expression)
        return "42"

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        given: dict[str, Any] = {
            "model": getattr(agents, kind)(model="demo", openai_client=client),
            "model_settings": agents.ModelSettings(temperature=0, max_tokens=60),
        }
        able = agents.Agent("A", instructions="Be brief.", tools=[calculator], **given)
        whole = await agents.Runner.run(able, "What is 12 + 30?")
        assert asked == ["12+30"] and "42" in whole.final_output
        streamed = agents.Runner.run_streamed(able, "What is 12 + 30?")
        names = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in names and streamed.final_output == whole.final_output
        typed = agents.Agent("B", output_type=City, **given)
        assert isinstance((await agents.Runner.run(typed, "Paris")).final_output, City)
