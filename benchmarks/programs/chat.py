"""Conversations of four turns: short answers, and long ones."""

from __future__ import annotations

import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client, Tokens
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

TURNS, SHORT, LONG = 4, 8, 96
SYSTEM = (
    "You are a helpful assistant. Answer what is asked, say so where you are not sure, and keep to "
    "what you know. Do not repeat the question."
)


@rl.function
def program(s: Any, turns: list[str], tokens: int) -> Any:
    s += rl.system(SYSTEM)
    for said in turns:
        s += rl.user(said) + rl.assistant(rl.gen("reply", max_tokens=tokens))
        s.sync()  # the user reads it before the next turn
    return s["reply"]


async def requests(client: Client, turns: list[str], tokens: int) -> Tokens:
    """Render the template's text, as a server's chat interface would."""
    prompt: list[str | Tokens] = [f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"]
    for said in turns:
        prompt += [f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"]
        prompt += [await client.complete(prompt, tokens), "<|im_end|>\n"]
    return []


def _workload(name: str, tokens: int, batch: int) -> Workload:
    def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
        said = [
            [turn[:400] for talk in source.sample(texts.talks, TURNS // 2) for turn in talk]
            for _ in range(count)
        ]
        return [(turns, tokens) for turns in said]

    describe = f"{TURNS} turns, answers of {tokens} tokens"
    return Workload(name, describe, batch, program, requests, rows)


WORKLOADS = (_workload("chat, short", SHORT, 6), _workload("chat, long", LONG, 6))
