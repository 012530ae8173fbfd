"""Generative agents: a person, observed events, and the next action (Park et al. 2023)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

EVENTS, THOUGHT, PLAN = 4, 24, 40
RULES = (
    "You play a person of a small town. You remember what you see, think about it and make plans. "
    "Rate how much an event matters to the person from 1 (brushing one's teeth) to 9 (a wedding).\n"
)
DIGIT = "[1-9]"


def _rate(event: str) -> str:
    return f"Event: {event}\nRating: "


@rl.function
def program(s: Any, person: str, events: list[str]) -> Any:
    s += RULES + person
    ratings = s.fork(len(events))
    ratings += [_rate(one) + rl.gen("rating", regex=DIGIT, max_tokens=1) for one in events]
    (reflection,) = s.fork(1)
    reflection += "Seen: " + " ".join(events) + "\nThought:" + rl.gen("thought", max_tokens=THOUGHT)
    reflection += "\nPlan:" + rl.gen("plan", max_tokens=PLAN)
    return ratings["rating"], reflection["plan"]


async def requests(client: Client, person: str, events: list[str]) -> Any:
    ratings = (client.complete([RULES + person + _rate(one)], 1, regex=DIGIT) for one in events)
    return await asyncio.gather(*ratings, _plan(client, person, events))


async def _plan(client: Client, person: str, events: list[str]) -> Any:
    prompt = [RULES + person + "Seen: " + " ".join(events) + "\nThought:"]
    thought = await client.complete(prompt, THOUGHT)
    return await client.complete([*prompt, thought, "\nPlan:"], PLAN)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    """Draw rows: a person is three sentences, an event is the beginning of one."""
    return [
        (
            f"Person {number}: " + " ".join(source.sample(texts.sentences, 3)) + "\n",
            [sentence[:160] for sentence in source.sample(texts.sentences, EVENTS)],
        )
        for number in range(count)
    ]


WORKLOAD = Workload(
    "agents",
    f"{EVENTS} events rated, a thought and a plan, for each person",
    *(6, program, requests, rows),
)
