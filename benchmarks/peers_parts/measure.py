"""Driving one engine through one workload, and what is recorded of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.common import ForeignLoad
from benchmarks.peers_parts.workloads import Request, Tokens, Workload


@dataclass(frozen=True)
class News:
    """New tokens of a request, and the time (`time.perf_counter`) at which its client had them."""

    name: str
    tokens: Tokens
    finished: bool
    at: float


class OnlineEngine(Protocol):
    """An engine that requests may join at any time."""

    replies_are_ids: bool
    """False: it only tells text; follow-ups then hold stand-ins (`Workload.fixed_reply`)."""

    def reset(self) -> None:
        """Forget every cached prefix."""

    def add(self, request: Request) -> None: ...

    def step(self) -> Sequence[News]:
        """Wait for something new."""

    def cached(self) -> int | None:
        """Prompt tokens that were found in the cache since `reset`."""


@dataclass(frozen=True)
class Row:
    """One workload, once, on one engine. Seconds, tokens, cores.

    `ttft_mean_s`: from handing a request over until its client has the first token.
    `foreign_cores`: cores that other programs kept busy meanwhile. `scale` below 1: fewer units
    than the workload has.
    """

    engine: str
    model: str
    workload: str
    seed: int
    repetition: int
    scale: float
    wall_s: float
    ttft_mean_s: float | None
    latency_mean_s: float | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    own_cores: float
    foreign_cores: float
    fixed_replies: bool = False
    outputs: dict[str, Tokens] = field(default_factory=dict, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Without the tokens, which would be most of the file."""
        return {name: value for name, value in asdict(self).items() if name != "outputs"}


@dataclass(frozen=True)
class Measured:
    """What was seen while a workload ran."""

    wall: float
    ttft: list[float]
    latency: list[float]
    prompt_tokens: int
    outputs: dict[str, Tokens]
    own_cores: float
    foreign_cores: float


def drive(engine: OnlineEngine, workload: Workload) -> Measured:
    """Hand over all first requests at once, each follow-up as soon as its answer is there.

    Raises RuntimeError if a reply has not exactly the wanted length.
    """
    live: dict[str, tuple[Request, float, Tokens]] = {}
    ttft, latency, outputs = [], [], {}
    prompt_tokens = 0

    def hand_over(requests: Sequence[Request]) -> None:
        for request in requests:
            live[request.name] = (request, time.perf_counter(), [])
            engine.add(request)

    first = workload.start()
    load, start = ForeignLoad(), time.perf_counter()
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
            latency.append(news.at - since)
            prompt_tokens += len(request.prompt)
            outputs[request.name] = reply
            shown = reply if engine.replies_are_ids else workload.fixed_reply(request)
            hand_over(workload.answered(request, shown))
    wall = time.perf_counter() - start
    return Measured(
        wall=wall,
        ttft=ttft,
        latency=latency,
        prompt_tokens=prompt_tokens,
        outputs=outputs,
        own_cores=load.own_seconds() / wall,
        foreign_cores=load.cores(),
    )


def row_of(
    measured: Measured,
    engine: str,
    model: str,
    workload: Workload,
    seed: int,
    repetition: int,
    cached: int | None,
    fixed_replies: bool = False,
) -> Row:
    return Row(
        engine=engine,
        model=model,
        workload=workload.name,
        seed=seed,
        repetition=repetition,
        scale=workload.scale,
        wall_s=measured.wall,
        ttft_mean_s=statistics.mean(measured.ttft) if measured.ttft else None,
        latency_mean_s=statistics.mean(measured.latency) if measured.latency else None,
        requests=len(measured.outputs),
        prompt_tokens=measured.prompt_tokens,
        output_tokens=sum(map(len, measured.outputs.values())),
        cached_tokens=cached,
        own_cores=round(measured.own_cores, 3),
        foreign_cores=round(measured.foreign_cores, 3),
        fixed_replies=fixed_replies,
        outputs=measured.outputs,
    )
