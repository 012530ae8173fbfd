"""Drives one engine through one workload. Standard library only: peers run this file, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.peers.workloads import Request, Tokens, Workload


class PeerError(RuntimeError):
    """Raised when a peer could not be started, failed, or took too long."""


@dataclass(frozen=True)
class News:
    """New tokens of a request, and the time (`time.perf_counter`) at which its client got them."""

    name: str
    tokens: Tokens
    finished: bool
    at: float


class OnlineEngine(Protocol):
    """An engine that accepts requests at any time."""

    replies_are_ids: bool
    """False: it only tells text; follow-ups then hold stand-ins (`Workload.fixed_reply`)."""

    def reset(self) -> None:
        """Forget every cached prefix."""

    def add(self, request: Request) -> None: ...

    def step(self) -> Sequence[News]:
        """Wait for new tokens."""

    def cached(self) -> int | None:
        """Return the prompt tokens found in the cache since `reset`."""


@dataclass(frozen=True)
class Driven:
    """Observations of a workload's run: seconds, and the tokens of each request.

    `cached`: prompt tokens from the cache; None if the engine does not report them.
    `fixed_replies`: follow-ups had stand-ins for the engine's output.
    """

    wall: float
    ttft: list[float]
    prompt_tokens: int
    outputs: dict[str, Tokens]
    cached: int | None
    fixed_replies: bool = False


def drive(engine: OnlineEngine, workload: Workload) -> Driven:
    """Empty the cache; submit all first requests at once, and each follow-up as soon as its answer
    is there.

    Raises RuntimeError if a reply has another length than wanted.
    """
    live: dict[str, tuple[Request, float, Tokens]] = {}
    ttft: list[float] = []
    outputs: dict[str, Tokens] = {}
    prompt_tokens = 0

    def hand_over(requests: Sequence[Request]) -> None:
        for request in requests:
            live[request.name] = (request, time.perf_counter(), [])
            engine.add(request)

    engine.reset()
    first = workload.start()
    start = time.perf_counter()
    hand_over(first)
    while live:
        for news in engine.step():
            request, since, reply = live[news.name]
            if not reply and news.tokens:
                ttft.append(news.at - since)
            reply.extend(news.tokens)
            if not news.finished:
                continue
            if len(reply) != request.wanted:
                raise RuntimeError(
                    f"{workload.name} {request.name}: asked for {request.wanted} tokens, "
                    f"got {len(reply)}"
                )
            del live[news.name]
            prompt_tokens += len(request.prompt)
            outputs[request.name] = reply
            shown = reply if engine.replies_are_ids else workload.fixed_reply(request)
            hand_over(workload.answered(request, shown))
    wall = time.perf_counter() - start
    fixed = not engine.replies_are_ids
    return Driven(wall, ttft, prompt_tokens, outputs, engine.cached(), fixed)
