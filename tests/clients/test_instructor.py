"""instructor: typed values by tools, by schemas and by responses, whole and in parts."""

from __future__ import annotations

import openai
import pydantic
import pytest

instructor = pytest.importorskip("instructor", reason="needs the extra `clients-all`")

ASK = [{"role": "user", "content": "Paris is large."}]


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    large: bool


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_typed_values(url: str, mode: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        given = {"model": "demo", "messages": ASK, "temperature": 0, "max_retries": 0}
        value = client.chat.completions.create(response_model=City, **given)
        assert isinstance(value, City)
        if mode == "JSON_SCHEMA":
            parts = list(client.chat.completions.create_partial(response_model=City, **given))
            assert len(parts) > 1 and parts[-1].model_dump() == value.model_dump()
