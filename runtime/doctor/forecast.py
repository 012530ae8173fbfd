"""What a model needs and reaches at best on a machine, from the machine's ceilings."""

from __future__ import annotations

from dataclasses import dataclass

from rootlace.runtime.doctor.ceilings import Ceilings
from rootlace.runtime.doctor.work import Elements, Row, step_work
from rootlace.runtime.model.families.spec import ModelSpec

PROMPTS = (256, 1024, 4096)
"""Tokens of the prompts whose first token is forecast."""
REQUESTS = (1, 8, 64)
"""How many requests decode at once."""
CONTEXT = 1024
"""Tokens of context that each of these requests has."""


@dataclass(frozen=True)
class Room:
    """Tokens that fit: into the context, into the KV cache, into one step."""

    context: int
    cache: int
    step: int


@dataclass(frozen=True)
class FirstToken:
    prompt: int
    seconds: float


@dataclass(frozen=True)
class Decoding:
    """`requests` at once, each of `context` tokens, give `tokens_per_second` all together."""

    requests: int
    context: int
    tokens_per_second: float


@dataclass(frozen=True)
class Forecast:
    first_tokens: tuple[FirstToken, ...]
    decoding: tuple[Decoding, ...]


def forecast(spec: ModelSpec, element: Elements, ceilings: Ceilings, room: Room) -> Forecast:
    """The forecast for all of `PROMPTS` and `REQUESTS` that there is room for. The model's longest
    prompt takes the place of longer ones.

    A step takes as long as its products and its attention at their rates, or as its reading at the
    bandwidth, whichever is longer. A real one takes longer: what lies between products and
    attention is not counted, nor what the host does, which is most of a very small model's step.
    """
    longest = min(room.context, room.cache)
    prompts = sorted({min(prompt, longest) for prompt in PROMPTS})
    context = min(CONTEXT, longest)
    requests = [count for count in REQUESTS if count * context <= room.cache]
    return Forecast(
        tuple(
            FirstToken(prompt, prompt_seconds(spec, element, ceilings, prompt, room.step))
            for prompt in prompts
        ),
        tuple(
            Decoding(
                count,
                context,
                count / step_seconds(spec, element, ceilings, [Row(1, context)] * count),
            )
            for count in requests
        ),
    )


def prompt_seconds(
    spec: ModelSpec, element: Elements, ceilings: Ceilings, prompt: int, step_tokens: int
) -> float:
    """Seconds of the steps that compute a prompt of which nothing is cached."""
    return sum(
        step_seconds(spec, element, ceilings, [Row(min(step_tokens, prompt - start), end)])
        for start in range(0, prompt, step_tokens)
        for end in [min(start + step_tokens, prompt)]
    )


def step_seconds(spec: ModelSpec, element: Elements, ceilings: Ceilings, rows: list[Row]) -> float:
    work = step_work(spec, rows, element)
    computing = work.products / ceilings.product_rate + work.attention / ceilings.attention_rate
    return max(computing, work.read / ceilings.read_bandwidth)
