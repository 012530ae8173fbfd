"""Traces of made-up loads in Mooncake's format, for `rootlace simulate`.

Each has what a public trace lacks: prompts that many requests share, while a queue is waiting.

- `few-shot`: 1,000 tasks, their popularity by Zipf's law with exponent 0.8; a task's examples (six
  blocks) and a question of its own.
- `agents`: sessions of some turns over one of three tool descriptions; each turn continues the last
  one a while after it, and some fork four branches at once.
- `hot-and-cold`: nine of ten requests share one of four long prefixes and are cheap once it is
  cached; the tenth shares nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 512

Request = tuple[float, int, int, list[int]]
"""Arrival in seconds, prompt tokens, output tokens, blocks."""


def few_shot(dice: random.Random, count: int) -> list[Request]:
    ids = itertools.count()
    tasks = [[next(ids) for _ in range(6)] for _ in range(1000)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(len(tasks))]
    found = []
    for at, task in zip(
        _poisson(dice, count, 10.0), dice.choices(tasks, weights, k=count), strict=True
    ):
        question = dice.randint(50, BLOCK)
        blocks = [*task, next(ids)]
        found.append((at, len(task) * BLOCK + question, dice.randint(16, 128), blocks))
    return found


def agents(dice: random.Random, count: int) -> list[Request]:
    ids = itertools.count()
    tools = [[next(ids) for _ in range(8)] for _ in range(3)]
    found: list[Request] = []
    starts = _poisson(dice, count, 0.35)
    for start in starts:
        path = [*dice.choice(tools), *(next(ids) for _ in range(dice.randint(4, 20)))]
        at = start
        for _ in range(dice.randint(3, 12)):
            branches = 4 if dice.random() < 0.15 else 1
            for _ in range(branches):
                mine = [*path, next(ids)]
                output = dice.randint(40, 400)
                found.append((at, len(mine) * BLOCK - dice.randrange(BLOCK), output, mine))
            path = [*path, *(next(ids) for _ in range(dice.randint(1, 2)))]
            at += 3 + dice.expovariate(1 / 8)
        if len(found) >= count:
            break
    return sorted(found)[:count]


def hot_and_cold(dice: random.Random, count: int) -> list[Request]:
    ids = itertools.count()
    hot = [[next(ids) for _ in range(16)] for _ in range(4)]
    found = []
    for at in _poisson(dice, count, 10.0):
        if dice.random() < 0.9:
            blocks = [*dice.choice(hot), next(ids)]
        else:
            blocks = [next(ids) for _ in range(dice.randint(4, 12))]
        found.append(
            (at, len(blocks) * BLOCK - dice.randrange(BLOCK), dice.randint(16, 200), blocks)
        )
    return found


LOADS: dict[str, Callable[[random.Random, int], list[Request]]] = {
    "few-shot": few_shot,
    "agents": agents,
    "hot-and-cold": hot_and_cold,
}


def _poisson(dice: random.Random, count: int, rate: float) -> list[float]:
    return list(itertools.accumulate(dice.expovariate(rate) for _ in range(count)))


def write_trace(name: str, count: int, seed: int, path: Path) -> None:
    """Write `count` requests of the load `name`, sorted by arrival."""
    with path.open("w") as file:
        for at, prompt, output, blocks in LOADS[name](random.Random(f"{name}/{seed}"), count):
            record: dict[str, Any] = {
                "timestamp": round(1000 * at),
                "input_length": prompt,
                "output_length": output,
                "hash_ids": blocks,
            }
            file.write(json.dumps(record) + "\n")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("load", choices=sorted(LOADS))
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_trace(given.load, given.requests, given.seed, given.file)


if __name__ == "__main__":
    main()
