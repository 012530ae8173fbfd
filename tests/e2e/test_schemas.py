"""A hundred schemas on the embedded model at temperature 1: whatever ends is valid."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rootlace as rl
from tests.constrained.random_schemas import random_schema

COUNT = 100
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.timeout(300)
def test_every_output_that_ends_is_valid(demo_model: Path) -> None:
    schemas = [random_schema(seed) for seed in range(COUNT)]
    gate = asyncio.Semaphore(32)

    async def ask(engine: rl.Engine, index: int) -> tuple[str, str]:
        """(how it ended, the text)"""
        params: dict[str, Any] = {
            "json_schema": json.dumps(schemas[index]),
            "temperature": 1.0,
            "max_new_tokens": 192,
            "seed": index,
            "whitespace": "flexible" if index % 4 == 0 else "compact",
        }
        async with gate:
            try:
                reply = await engine.async_generate("An example in JSON:", params)
            except rl.ProgramError as error:
                if error.code != "constraint_not_met":
                    raise
                return "not met", str(error)
        return reply["meta_info"]["finish_reason"]["type"], reply["text"]

    async def ask_all(engine: rl.Engine) -> list[tuple[str, str]]:
        return await asyncio.gather(*(ask(engine, index) for index in range(COUNT)))

    with rl.Engine(model_path=demo_model, threads=1) as engine:
        replies = asyncio.run(ask_all(engine))

    for schema, (reason, text) in zip(schemas, replies, strict=True):
        if reason == "stop":
            validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
            assert validator.is_valid(json.loads(text)), (schema, text)
    counts = Counter(reason for reason, _ in replies)
    # A model of stories and forms rambles in free strings; most schemas bound what it can say.
    assert counts["stop"] > 0.8 * COUNT, counts
    assert counts["not met"] <= 0.02 * COUNT, [
        text for reason, text in replies if reason == "not met"
    ]
