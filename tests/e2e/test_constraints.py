"""Constraints on the embedded model: hostile ones, all at once, beside ordinary traffic; then a
hundred schemas at temperature 1: each output that ends is valid."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

import rootlace as rl
from tests.structured.random_schemas import random_schema

DEEP: Any = {"type": "integer"}
for _ in range(400):
    DEEP = {"type": "array", "items": DEEP, "maxItems": 9}
WIDE = {
    "type": "object",
    "properties": {
        f"property_{i}": {"enum": [f"value {i} {j}" for j in range(10)]} for i in range(4000)
    },
}
HOSTILE: dict[str, dict[str, Any]] = {
    "exponential regex": {"regex": "(a|b)*a(a|b){40}(c|(a|b)*a(a|b){60})"},
    "nested counts": {"regex": "(((x{1,100000}){1,100000}){1,100000}){1,100000}"},
    "nested counts in a schema": {
        "json_schema": {
            "type": "array",
            "maxItems": 100000,
            "items": {"type": "array", "maxItems": 100000},
        }
    },
    "a megabyte of schema": {"json_schema": WIDE},
    "deep nesting": {"json_schema": DEEP},
    "a loop of references": {
        "json_schema": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 500}"} for i in range(500)},
        }
    },
    "a doubling chain of references": {
        "json_schema": {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
                "d40": {"type": "string"},
            },
        }
    },
    "a remote reference": {"json_schema": {"$ref": "https://example.com/schema.json"}},
    "a catastrophic pattern": {
        "json_schema": {
            "type": "string",
            "not": {"pattern": "^(a+)+$"},
            "pattern": "^(a|a|aa)+[ab]$",
        }
    },
}
MUST_FAIL = {"a megabyte of schema", "a loop of references", "a remote reference"}
TYPED = {"invalid_constraint", "constraint_not_met"}
COUNT = 100
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[rl.Engine]:
    with rl.Engine(model_path=demo_model, threads=1) as started:
        yield started


def test_they_fail_alone(engine: rl.Engine) -> None:
    """Each hostile request ends in bounds, in a typed error or a text; others are served."""

    async def attack(constraint: dict[str, Any]) -> str:
        params = {"max_new_tokens": 24, "temperature": 1.0, "seed": 1, **constraint}
        if "json_schema" in params:
            params["json_schema"] = json.dumps(params["json_schema"])
        try:
            reply = await engine.async_generate("Say something:", params)
        except rl.ProgramError as error:
            assert error.code in TYPED, (error.code, str(error))
            return error.code
        return str(reply["meta_info"]["finish_reason"]["type"])

    async def ordinary(number: int) -> str:
        constraint = {"regex": f"[a-z]{{1,4}} {number}"} if number % 2 else {}
        params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True, **constraint}
        reply = await engine.async_generate("Hello there", params)
        return str(reply["text"])

    async def run() -> tuple[dict[str, str], list[str], int]:
        attacks = {name: asyncio.create_task(attack(c)) for name, c in HOSTILE.items()}
        texts: list[str] = []
        during = 0
        while not all(task.done() for task in attacks.values()):
            texts.append(await ordinary(len(texts)))
            during += not all(task.done() for task in attacks.values())
        texts.append(await ordinary(len(texts)))
        return {name: await task for name, task in attacks.items()}, texts, during

    expected = asyncio.run(ordinary(0))
    processes = set(psutil.Process().children(recursive=True))
    begun = time.monotonic()
    outcomes, texts, during = asyncio.run(run())
    took = time.monotonic() - begun
    assert asyncio.run(ordinary(0)) == expected
    # The same processes still serve: none was restarted.
    assert all(process.is_running() for process in processes)
    for name in MUST_FAIL:
        assert outcomes[name] == "invalid_constraint", (name, outcomes)
    assert during >= 3, f"{during} ordinary requests were served in {took:.1f} s of attack"
    for number, text in enumerate(texts):
        assert text.endswith(f" {number}") if number % 2 else text == expected, (number, text)


def test_every_output_that_ends_is_valid(engine: rl.Engine) -> None:
    schemas = [random_schema(seed) for seed in range(COUNT)]
    gate = asyncio.Semaphore(32)

    async def ask(index: int) -> tuple[str, str]:
        """Return how the request ended, and its text."""
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

    async def ask_all() -> list[tuple[str, str]]:
        return await asyncio.gather(*(ask(index) for index in range(COUNT)))

    replies = asyncio.run(ask_all())
    for schema, (reason, text) in zip(schemas, replies, strict=True):
        if reason == "stop":
            validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
            assert validator.is_valid(json.loads(text)), (schema, text)
    counts = Counter(reason for reason, _ in replies)
    # A model of stories and forms rambles in free strings, so most schemas bound strings.
    assert counts["stop"] > 0.8 * COUNT, counts
    assert counts["not met"] <= 0.02 * COUNT, [
        text for reason, text in replies if reason == "not met"
    ]
