"""ReAct: an agent that thinks, acts and gets observations, replayed (Yao et al. 2023).

The trace gives the length of the agent's text in each step, and the observations; the model writes
the text.
"""

from __future__ import annotations

import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client, Tokens
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

STEPS, SAID, ANSWER = 3, 24, 8
"""Tokens of a step and of the answer."""


@rl.function
def program(s: Any, examples: str, question: str, told: list[str]) -> Any:
    s += f"{examples}\nQuestion: {question}\n"
    for number, observation in enumerate(told, 1):
        s += f"Thought {number}:" + rl.gen("said", max_tokens=SAID)
        s.sync()  # the observation depends on the text
        s += f"\nObservation {number}: {observation}\n"
    s += "Answer:" + rl.gen("answer", max_tokens=ANSWER)
    return s["answer"]


async def requests(client: Client, examples: str, question: str, told: list[str]) -> Tokens:
    prompt: list[str | Tokens] = [f"{examples}\nQuestion: {question}\n"]
    for number, observation in enumerate(told, 1):
        prompt += [f"Thought {number}:"]
        prompt += [await client.complete(prompt, SAID)]
        prompt += [f"\nObservation {number}: {observation}\n"]
    return await client.complete([*prompt, "Answer:"], ANSWER)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    return [
        (
            texts.agent_examples,
            question,
            [told for _, told in source.sample(texts.agent_steps, STEPS)],
        )
        for question in source.sample(texts.facts, count)
    ]


WORKLOAD = Workload(
    "ReAct", f"replayed traces: {STEPS} steps of {SAID} tokens", 4, program, requests, rows
)
