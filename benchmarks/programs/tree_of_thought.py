"""Tree of thought: steps proposed and rated, continued from the best (Yao et al. 2023)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client, Tokens
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

LEVELS, WIDTH, KEEP, THOUGHT = 3, 4, 1, 24
TASK = (
    "Use the numbers and the basic operations (+ - * /) to obtain 24. Each step takes two of the "
    "numbers that are left, and puts back what they give. Think about what can still be reached: a "
    "step that leaves large numbers is rarely good. Rate steps from 1 (impossible) to 9 (sure).\n"
)
RATE, DIGIT = "\nRating: ", "[1-9]"


def _step(level: int, number: int) -> str:
    return f"\nStep {level}, idea {number}:"


@rl.function
def program(s: Any, numbers: str) -> Any:
    s += TASK + f"Numbers: {numbers}"
    kept = [s]
    for level in range(LEVELS):
        grown = [fork for state in kept for fork in state.fork(WIDTH)]
        for number, fork in enumerate(grown):
            fork += _step(level, number) + rl.gen("thought", max_tokens=THOUGHT)
        judges = [fork.fork(1)[0] for fork in grown]
        for judge in judges:
            judge += RATE + rl.gen("rating", regex=DIGIT, max_tokens=1)
        rated = sorted(zip(judges, grown, strict=True), key=lambda one: one[0]["rating"])
        kept = [fork for _, fork in rated[-KEEP:]]
    return kept[-1]["thought"]


async def requests(client: Client, numbers: str) -> Any:
    async def grow(trunk: list[str | Tokens], level: int, number: int) -> Any:
        prompt = [*trunk, _step(level, number)]
        grown = [*prompt, await client.complete(prompt, THOUGHT)]
        return await client.complete([*grown, RATE], 1, regex=DIGIT), grown

    kept: list[list[str | Tokens]] = [[TASK + f"Numbers: {numbers}"]]
    for level in range(LEVELS):
        trunks = [trunk for trunk in kept for _ in range(WIDTH)]
        rated = await asyncio.gather(*(grow(trunk, level, n) for n, trunk in enumerate(trunks)))
        kept = [grown for _, grown in sorted(rated, key=lambda one: one[0])[-KEEP:]]
    return kept[-1][-1]


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    return [(numbers,) for numbers in source.sample(texts.puzzles, count)]


WORKLOAD = Workload(
    "tree of thought",
    f"{LEVELS} levels of {WIDTH} thoughts of {THOUGHT} tokens, each rated",
    *(5, program, requests, rows),
)
