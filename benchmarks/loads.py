"""Seeded loads for a serving engine, as token ids.

A load is a list of *units* that run side by side: one question, one conversation, one search.
A unit is a coroutine that asks for completions and builds its next prompt from what it got, so
follow-up prompts hold the engine's own tokens, as in real use. Every request asks for an exact
number of tokens: the work is the same whatever the model says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

Ask = Callable[[list[int], int], Awaitable[list[int]]]
"""`await ask(prompt ids, number of tokens)` gives the completion's ids."""

Unit = Coroutine[Any, Any, None]

FIRST_PLAIN_TOKEN = 300
"""Ids below may be special tokens or bytes."""


class Source:
    """Random token ids; equal seeds give equal ids."""

    def __init__(self, seed: str, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        low = min(FIRST_PLAIN_TOKEN, self._vocab_size // 2)
        return [self._random.randrange(low, self._vocab_size) for _ in range(count)]


@dataclass(frozen=True)
class Load:
    """`make(source, ask, units)` gives that many units; `units` is their usual number."""

    name: str
    describe: str
    units: int
    make: Callable[[Source, Ask, int], list[Unit]]

    def start(self, seed: str, vocab_size: int, ask: Ask, scale: float) -> list[Unit]:
        """The units of one run; `scale` changes their number, never their lengths."""
        source = Source(f"{self.name}/{seed}", vocab_size)
        return self.make(source, ask, max(1, round(self.units * scale)))


def few_shot(source: Source, ask: Ask, units: int) -> list[Unit]:
    examples = source.tokens(1000)

    async def question(text: list[int]) -> None:
        await ask(examples + text, 16)

    return [question(source.tokens(60)) for _ in range(units)]


def chat(source: Source, ask: Ask, units: int) -> list[Unit]:
    system = source.tokens(200)

    async def conversation(turns: list[list[int]]) -> None:
        history = list(system)
        for turn in turns:
            history += turn
            history += await ask(history, 32)

    return [conversation([source.tokens(100) for _ in range(4)]) for _ in range(units)]


def tree_search(source: Source, ask: Ask, units: int) -> list[Unit]:
    """Two levels with four branches each: every thought is expanded by four more."""
    width = 4

    async def search(problem: list[int], hints: list[list[int]]) -> None:
        async def thought(first: int) -> None:
            prompt = problem + hints[first]
            so_far = prompt + await ask(prompt, 32)
            own = hints[width * (first + 1) : width * (first + 2)]
            await asyncio.gather(*[ask(so_far + hint, 32) for hint in own])

        await asyncio.gather(*[thought(first) for first in range(width)])

    return [
        search(source.tokens(400), [source.tokens(20) for _ in range(width + width * width)])
        for _ in range(units)
    ]


def long_documents(source: Source, ask: Ask, units: int) -> list[Unit]:
    """Six questions about each document, asked in turn over all documents."""
    documents = [source.tokens(4000) for _ in range(units)]

    async def question(document: list[int], text: list[int]) -> None:
        await ask(document + text, 16)

    return [question(document, source.tokens(30)) for _ in range(6) for document in documents]


def no_sharing(source: Source, ask: Ask, units: int) -> list[Unit]:
    async def request(text: list[int]) -> None:
        await ask(text, 64)

    return [request(source.tokens(256)) for _ in range(units)]


LOADS = {
    load.name: load
    for load in (
        Load("few-shot", "1,000 tokens of examples, 60 of question, 16 out", 64, few_shot),
        Load("chat", "200 of system prompt, 4 turns of 100 in and 32 out", 8, chat),
        Load("tree-search", "400 of problem, 2 levels of 4 branches, 32 out each", 4, tree_search),
        Load(
            "long-docs", "6 questions on each document of 4,000 tokens, 16 out", 4, long_documents
        ),
        Load("no-sharing", "256 in, 64 out, nothing in common", 32, no_sharing),
    )
}
