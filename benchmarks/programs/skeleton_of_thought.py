"""Skeleton of thought: an outline, then all of its points at once (Ning et al. 2024)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client, Tokens
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

POINTS, OUTLINE, POINT = 6, 48, 48
TASK = (
    "Give short tips first, one in a line, with a number each. Then expand every tip into a "
    "paragraph that says why it helps, gives an example and names a mistake to avoid.\nTopic: "
)


def _expand(number: int) -> str:
    return f"\nThe paragraph about tip {number}:"


@rl.function
def program(s: Any, topic: str) -> Any:
    s += f"{TASK}{topic}\nTips:" + rl.gen("outline", max_tokens=OUTLINE)
    points = s.fork(POINTS)
    points += lambda i: _expand(i) + rl.gen("point", max_tokens=POINT)
    return points["point"]


async def requests(client: Client, topic: str) -> list[Tokens]:
    prompt: list[str | Tokens] = [f"{TASK}{topic}\nTips:"]
    begun = [*prompt, await client.complete(prompt, OUTLINE)]
    points = (client.complete([*begun, _expand(i)], POINT) for i in range(POINTS))
    return await asyncio.gather(*points)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    return [(topic,) for topic in source.sample(texts.topics, count)]


WORKLOAD = Workload(
    "skeleton of thought",
    f"an outline of {OUTLINE} tokens, {POINTS} points of {POINT}",
    *(4, program, requests, rows),
)
