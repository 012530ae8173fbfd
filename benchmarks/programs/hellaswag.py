"""HellaSwag: the likeliest of four endings, 20 examples before them (Zellers et al. 2019)."""

from __future__ import annotations

import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

EXAMPLES = 20


@rl.function
def program(s: Any, examples: str, beginning: str, endings: list[str]) -> Any:
    s += examples + beginning + rl.select("ending", endings)
    return s["ending"]


async def requests(client: Client, examples: str, beginning: str, endings: list[str]) -> int:
    return await client.rank([examples + beginning], endings)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    drawn = source.sample(texts.endings, EXAMPLES + count)
    shown, asked = drawn[:EXAMPLES], drawn[EXAMPLES:]
    examples = "".join(f"{one.question} {one.choices[one.answer]}\n\n" for one in shown)
    return [(examples, one.question, [f" {choice}" for choice in one.choices]) for one in asked]


WORKLOAD = Workload(
    "HellaSwag", "20 examples, the likeliest of four endings", 2, program, requests, rows
)
