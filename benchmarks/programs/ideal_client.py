"""A client without a server, which counts the savings of an unlimited, exact cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.ideal_cache import IdealCache
from benchmarks.programs.client import Encoder, Prompt, Tokens

RECORD = "{}"


class IdealClient:
    """A `Client` with random tokens as answers; concurrent programs advance in lockstep.

    It counts our runtime's requests for the program: a choice among several, of one token or many,
    is a prompt for each, of which the choice and the token before it must be computed.
    """

    def __init__(self, encoder: Encoder, cache: IdealCache) -> None:
        self._encoder, self._cache = encoder, cache
        self._source = random.Random(0)

    async def complete(self, prompt: Prompt, tokens: int, regex: str | None = None) -> Tokens:
        ids = self._encoder.ids(prompt)
        self._cache.submit(ids)
        await asyncio.sleep(0)
        reply = [self._source.randrange(self._encoder.size) for _ in range(tokens)]
        self._cache.finish(ids, reply)
        return reply

    async def choose(self, prompt: Prompt, choices: Sequence[str]) -> int:
        start = len(self._encoder.ids(prompt))
        for choice in choices:
            ids = self._encoder.ids([*prompt, choice])
            self._cache.submit(ids, len(ids) - start + 1)
        await asyncio.sleep(0)
        return 0

    rank = choose

    async def write_json(self, prompt: Prompt, schema: dict[str, Any]) -> str:
        await self.complete(prompt, 1)
        return RECORD
