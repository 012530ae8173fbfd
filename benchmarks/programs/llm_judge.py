"""LLM as a judge: branch, solve, merge; an answer is judged from several sides at once.

After Zheng et al. 2023 (the instructions) and Saha et al. 2024 (the branches).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client, Tokens
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

SIDES = ["helpfulness", "relevance", "accuracy", "depth", "creativity"]
OPINION, SUMMARY = 32, 24
MERGE, GRADE, DIGIT = "\nAll opinions:", "\nSummary:", "[1-9]"


def _side(name: str) -> str:
    return f"\nOpinion on its {name}:"


@rl.function
def program(s: Any, case: str) -> Any:
    s += case
    sides = s.fork(len(SIDES))
    sides += [_side(name) + rl.gen("opinion", max_tokens=OPINION) for name in SIDES]
    opinions = [side.get_meta_info("opinion")["output_ids"] for side in sides]
    s += MERGE
    for opinion in opinions:  # as tokens, equally many for each engine
        s += rl.ids(opinion)
    s += GRADE + rl.gen("summary", max_tokens=SUMMARY)
    s += "\nGrade: " + rl.gen("grade", regex=DIGIT, max_tokens=1)
    return s["grade"]


async def requests(client: Client, case: str) -> Tokens:
    opinions = await asyncio.gather(
        *(client.complete([case + _side(name)], OPINION) for name in SIDES)
    )
    prompt: list[str | Tokens] = [case + MERGE, *opinions, GRADE]
    summary = await client.complete(prompt, SUMMARY)
    return await client.complete([*prompt, summary, "\nGrade: "], 1, regex=DIGIT)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    return [
        (texts.judge.replace("{question}", question).replace("{answer}", answer[:1200]),)
        for question, answer in source.sample(texts.answers, count)
    ]


WORKLOAD = Workload(
    "LLM judge",
    f"an answer from {len(SIDES)} sides, {OPINION} tokens each, and a grade",
    *(4, program, requests, rows),
)
