"""What is asked: prompts of random words, by length, arrival and what they have in common."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

# Everyday words, which are a token each in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea kid body information back parent
face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music mind voice
paper space ground light summer field garden river stone window letter
"""
WORDS = _WORDS.split()

BLOCK = 512
"""Tokens of one of a trace's hash ids."""


class BadTrace(Exception):
    """A trace that cannot be read; the message says which line and why."""


@dataclass(frozen=True)
class Ask:
    """One request, `at` so many seconds after the first; None: as soon as there is room."""

    prompt: str
    max_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens; `words` is how many words make a token of the server's."""

    requests: int
    input_tokens: int
    output_tokens: int
    prefix: int
    groups: int
    words: float
    seed: int

    def text(self, tokens: float, *seed: object) -> str:
        """About so many tokens, the same for the same seed."""
        rng = random.Random(repr((self.seed, *seed)))
        count = max(round(tokens * self.words), 1)
        return " ".join(rng.choices(WORDS, k=count))


def unlike(shape: Shape) -> list[Ask]:
    """Prompts that have nothing in common."""
    return [
        Ask(shape.text(shape.input_tokens, "random", number), shape.output_tokens)
        for number in range(shape.requests)
    ]


def shared(shape: Shape) -> list[Ask]:
    """In turn, prompts of several groups, those of one behind a common prefix."""
    prefixes = [shape.text(shape.prefix, "prefix", group) for group in range(shape.groups)]
    return [
        Ask(
            f"{prefixes[number % shape.groups]}\n{shape.text(shape.input_tokens, 'own', number)}",
            shape.output_tokens,
        )
        for number in range(shape.requests)
    ]


def chat(shape: Shape) -> list[Ask]:
    """Lengths spread as those of conversations are: log-normal, most of them short. The lengths
    asked for are the medians."""
    rng = random.Random(f"chat {shape.seed}")
    asks = []
    for number in range(shape.requests):
        tokens = min(
            rng.lognormvariate(math.log(shape.input_tokens), 1.0), 8.0 * shape.input_tokens
        )
        answer = rng.lognormvariate(math.log(shape.output_tokens), 0.8)
        most = min(max(round(answer), 1), 8 * shape.output_tokens)
        asks.append(Ask(shape.text(tokens, "chat", number), most))
    return asks


LOADS: dict[str, Callable[[Shape], list[Ask]]] = {
    "chat": chat,
    "shared": shared,
    "random": unlike,
}


def arriving(asks: list[Ask], rate: float, seed: int) -> list[Ask]:
    """The requests at random times, `rate` per second; 0: each as soon as there is room."""
    if not rate:
        return asks
    rng = random.Random(f"arrivals {seed}")
    now, timed = 0.0, []
    for ask in asks:
        timed.append(replace(ask, at=now))
        now += rng.expovariate(rate)
    return timed


def of_trace(path: Path, shape: Shape, speed: float) -> list[Ask]:
    """The first `shape.requests` requests of a trace in Mooncake's form (a timestamp in
    milliseconds, equal hash ids for equal blocks of 512 tokens), also gzipped.

    Raises BadTrace.
    """
    asks: list[Ask] = []
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
            for line in lines:
                number += 1
                if len(asks) == shape.requests:
                    break
                if line.strip():
                    asks.append(_asked(json.loads(line), shape, speed))
    except (OSError, EOFError) as error:
        raise BadTrace(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadTrace(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    if not asks:
        raise BadTrace(f"{path} holds no requests")
    asks.sort(key=lambda ask: ask.at or 0.0)
    first = asks[0].at or 0.0
    return [replace(ask, at=(ask.at or 0.0) - first) for ask in asks]


def _asked(line: dict[str, object], shape: Shape, speed: float) -> Ask:
    left = int(line["input_length"])  # type: ignore[call-overload]
    blocks: Iterable[object] = line["hash_ids"]  # type: ignore[assignment]
    parts = []
    for block in blocks:
        if left <= 0:
            break
        parts.append(shape.text(min(left, BLOCK), "block", block))
        left -= BLOCK
    at = float(line["timestamp"]) / 1000 / speed  # type: ignore[arg-type]
    return Ask(" ".join(parts), max(int(line["output_length"]), 1), at)  # type: ignore[call-overload]
