"""A client of vLLM's server with OpenAI's interface: concurrent requests over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import aiohttp

from benchmarks.peers.drive import PeerError
from benchmarks.programs.client import Encoder, Prompt, Tokens

JSON_TOKENS = 300
"""More than any record has."""


@dataclass
class Usage:
    """Tokens of all requests, as counted by the server."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class VllmClient:
    """A `Client`. Nothing is streamed: no program here needs a part of an answer.

    A choice of one token, and JSON, are structured outputs; whole continuations are compared by the
    log-probabilities of prompts, as in lm-eval.
    """

    def __init__(self, session: aiohttp.ClientSession, model: str, encoder: Encoder) -> None:
        self._session, self._model, self._encoder = session, model, encoder
        self.usage = Usage()

    async def complete(self, prompt: Prompt, tokens: int, regex: str | None = None) -> Tokens:
        constraint = {} if regex is None else {"structured_outputs": {"regex": regex}}
        options = {"ignore_eos": True, "return_token_ids": True, **constraint}
        ids: Tokens = (await self._ask(self._encoder.ids(prompt), tokens, **options))["token_ids"]
        if len(ids) != tokens:
            raise PeerError(f"asked for {tokens} tokens, got {len(ids)}")
        return ids

    async def choose(self, prompt: Prompt, choices: Sequence[str]) -> int:
        ids = self._encoder.ids(prompt)
        reply = await self._ask(ids, 1, structured_outputs={"choice": choices})
        return choices.index(reply["text"])

    async def rank(self, prompt: Prompt, choices: Sequence[str]) -> int:
        start = len(self._encoder.ids(prompt))
        scores = await asyncio.gather(*(self._score(prompt, start, choice) for choice in choices))
        return scores.index(max(scores))

    async def _score(self, prompt: Prompt, start: int, choice: str) -> float:
        """Return the mean log-probability of the choice's tokens behind the prompt's."""
        ids = self._encoder.ids([*prompt, choice])
        reply = await self._ask(ids, 1, prompt_logprobs=0)
        scored = zip(ids[start:], reply["prompt_logprobs"][start:], strict=True)
        return fmean(found[str(token)]["logprob"] for token, found in scored)

    async def write_json(self, prompt: Prompt, schema: dict[str, Any]) -> str:
        options = {"structured_outputs": {"json": schema}}
        return str((await self._ask(self._encoder.ids(prompt), JSON_TOKENS, **options))["text"])

    async def _ask(self, ids: Tokens, tokens: int, **options: Any) -> dict[str, Any]:
        """Return the answer's only choice. Raises PeerError."""
        body = {"model": self._model, "prompt": ids, "max_tokens": tokens, "temperature": 0}
        async with self._session.post("/v1/completions", json=body | options) as response:
            reply = await response.json()
        if response.status != 200:
            raise PeerError(f"{response.status}: {str(reply)[:300]}")
        usage = reply["usage"]
        self.usage.prompt += usage["prompt_tokens"]
        self.usage.output += usage["completion_tokens"]
        self.usage.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choice: dict[str, Any] = reply["choices"][0]
        return choice
