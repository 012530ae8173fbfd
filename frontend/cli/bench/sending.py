"""Sends requests to a server and notes when its answers come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rootlace.cli.bench.loads import WORDS, Ask

_PROBE_WORDS = 100


class Unusable(Exception):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    url: str
    api_key: str
    model: str

    def session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            read_bufsize=2**20,
        )


@dataclass
class Timed:
    """One request: seconds since the first was due. `pieces` are when its text came.

    Times count from when it was due, if requests come by a clock: one that had to wait for an
    earlier one (`--concurrency`) waited for the server. `due` is None where each is sent as soon as
    there is room.
    """

    due: float | None
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.pieces[0] - self.begun

    @property
    def whole(self) -> float:
        return self.ended - self.begun

    @property
    def begun(self) -> float:
        return self.sent if self.due is None else self.due

    @property
    def between(self) -> float:
        """Seconds between tokens, on average; 0 where there was one."""
        count = self.output_tokens - 1
        return (self.pieces[-1] - self.pieces[0]) / count if count > 0 else 0.0


async def look(server: Server) -> tuple[str, float]:
    """The model's name, and how many of our words make one of its tokens.

    Raises Unusable.
    """
    async with server.session() as http:
        try:
            model = server.model
            if not model:
                async with http.get(f"{server.url}/v1/models") as reply:
                    model = (await _answer(reply))["data"][0]["id"]
            body = {
                "model": model,
                "prompt": " ".join(WORDS[:_PROBE_WORDS]),
                "max_tokens": 1,
                "temperature": 0,
            }
            async with http.post(f"{server.url}/v1/completions", json=body) as reply:
                tokens = (await _answer(reply))["usage"]["prompt_tokens"]
        except (aiohttp.ClientError, OSError) as error:
            raise Unusable(f"there is no server at {server.url}: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unusable(f"{server.url} does not answer as OpenAI's servers do") from error
    return model, _PROBE_WORDS / max(tokens, 1)


async def _answer(reply: aiohttp.ClientResponse) -> Any:
    text = await reply.text()
    if reply.status != 200:
        raise Unusable(f"{reply.url}: {_said(text, reply.status)}")
    return json.loads(text)


def _said(text: str, status: int) -> str:
    try:
        return f"{status}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {text[:200]}"


async def send_all(
    server: Server, asks: list[Ask], concurrency: int, ended: Callable[[], None]
) -> list[Timed]:
    """All requests, none before it is due, at most `concurrency` at a time."""
    free = asyncio.Semaphore(concurrency)
    begun = time.perf_counter()

    async def one(ask: Ask) -> Timed:
        timed = Timed(ask.at)
        await asyncio.sleep(max((ask.at or 0.0) - (time.perf_counter() - begun), 0))
        async with free:
            timed.sent = time.perf_counter() - begun
            try:
                await _send(http, server, ask, timed, begun)
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                timed.error = f"{type(error).__name__}: {error}"[:200]
            timed.ended = time.perf_counter() - begun
        ended()
        return timed

    async with server.session() as http:
        return list(await asyncio.gather(*map(one, asks)))


async def _send(
    http: aiohttp.ClientSession, server: Server, ask: Ask, timed: Timed, begun: float
) -> None:
    body = {
        "model": server.model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.post(f"{server.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            timed.error = _said(await reply.text(), reply.status)
            return
        async for event in _events(reply):
            if error := event.get("error"):
                timed.error = str(error["message"] if isinstance(error, dict) else error)
                return
            if any(choice.get("text") for choice in event.get("choices", ())):
                timed.pieces.append(time.perf_counter() - begun)
            if usage := event.get("usage"):
                timed.prompt_tokens = usage["prompt_tokens"]
                timed.output_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                timed.cached_tokens = details.get("cached_tokens") or 0
    if not timed.pieces:
        timed.error = timed.error or "the answer has no text"


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
