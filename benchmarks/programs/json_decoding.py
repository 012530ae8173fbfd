"""JSON decoding: a record of a passage's facts, by a schema.

Every string has a fixed length, and the words of an enumeration have equal length: a record has the
same number of characters whatever the model.
"""

from __future__ import annotations

import json
import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

FIELDS: dict[str, dict[str, Any]] = {
    "name_of_the_subject": {"type": "string", "pattern": "^[A-Z][a-z]{7} [A-Z][a-z]{7}$"},
    "kind_of_subject": {"enum": ["person", "animal", "matter", "custom"]},
    "first_mentioned": {"type": "string", "pattern": "^1[0-9]{3}-0[1-9]-1[0-9]$"},
    "place_of_origin": {"type": "string", "pattern": "^[A-Z][a-z]{9}$"},
    "confidence_of_the_source": {"enum": ["little", "medium", "strong"]},
    "reference_number": {"type": "string", "pattern": "^[A-F0-9]{8}$"},
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
TASK = "Take the facts from the passage, as JSON with these fields: " + ", ".join(FIELDS) + ".\n"


def _prompt(passage: str) -> str:
    return f"{TASK}Passage: {passage}\nJSON:\n"


@rl.function
def program(s: Any, passage: str) -> Any:
    s += _prompt(passage) + rl.gen(
        "record", json_schema=SCHEMA, whitespace="compact", max_tokens=300, ignore_eos=False
    )
    return json.loads(s["record"])


async def requests(client: Client, passage: str) -> Any:
    return json.loads(await client.write_json([_prompt(passage)], SCHEMA))


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    return [(passage[:400],) for passage, _ in source.sample(texts.passages, count)]


WORKLOAD = Workload(
    "JSON decoding", f"records of {len(FIELDS)} fields, by a schema", 8, program, requests, rows
)
