"""Traces of made-up loads in Mooncake's format, for `rootlace simulate`.

They have what public traces lack.

*hot-and-cold*: prompts that many requests share, while a queue is waiting. Nine of ten requests
share one of four long prefixes ("hot") and are cheap once it is cached; the tenth shares nothing
("cold").

*tree-search*: programs that search trees of thought. Each has a question behind the examples of one
of 160 tasks, and asks for four thoughts; of each level's thoughts four are followed, each with four
more, until the answer.

*agents*: sessions of 3 to 12 turns over one of three descriptions of tools. Each turn continues
the one before some seconds later, and some turns are asked four times, with different ends.

*long-and-short*: chats of short prompts and long answers, and, one of five requests, questions
about long documents, whose answers are short. Nobody shares anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
RATE = 10.0
"""Requests per second, unless another one is asked for."""


TASKS = 160
EXAMPLES = 24
"""Blocks of a task's examples."""
LEVELS = 4
WIDTH = 4
SECONDS_PER_LEVEL = 6.0
FORKED = 0.15
"""Of an agent's turns."""


@dataclass(frozen=True)
class Asked:
    """A request: its second, the blocks of its prompt, and the tokens of its output."""

    at: float
    blocks: list[int]
    output: int


def hot_and_cold(dice: random.Random, ids: Iterator[int], rate: float) -> Iterator[Asked]:
    hot = [[next(ids) for _ in range(16)] for _ in range(4)]
    at = 0.0
    while True:
        at += dice.expovariate(rate)
        if dice.random() < 0.9:
            blocks = [*dice.choice(hot), next(ids)]
        else:
            blocks = [next(ids) for _ in range(dice.randint(4, 12))]
        yield Asked(at, blocks, dice.randint(16, 200))


def tree_search(dice: random.Random, ids: Iterator[int], rate: float) -> Iterator[Asked]:
    """Yield requests in order of arrival of programs, which overlap."""
    tasks = [[next(ids) for _ in range(EXAMPLES)] for _ in range(TASKS)]
    began = 0.0
    while True:
        began += dice.expovariate(rate) * (1 + (LEVELS - 1) * WIDTH) * WIDTH
        # Some tasks are more frequent than others.
        task = tasks[min(int(dice.expovariate(4 / TASKS)), TASKS - 1)]
        paths = [[*task, *(next(ids) for _ in range(dice.randint(1, 2)))]]
        for level in range(LEVELS):
            at = began + level * SECONDS_PER_LEVEL * dice.uniform(0.8, 1.2)
            for path in paths:
                for _ in range(WIDTH):
                    yield Asked(at, path, dice.randint(100, 300))
            # Each continued thought is a block behind the path from which it came.
            paths = [[*dice.choice(paths), next(ids)] for _ in range(WIDTH)]


def agents(dice: random.Random, ids: Iterator[int], rate: float) -> Iterator[Asked]:
    """Yield requests in order of arrival of sessions, which overlap."""
    tools = [[next(ids) for _ in range(8)] for _ in range(3)]
    began = 0.0
    while True:
        began += dice.expovariate(rate) * 7.5 * (1 + 3 * FORKED)
        path = [*dice.choice(tools), *(next(ids) for _ in range(dice.randint(4, 20)))]
        at = began
        for _ in range(dice.randint(3, 12)):
            for _ in range(4 if dice.random() < FORKED else 1):
                yield Asked(at, [*path, next(ids)], dice.randint(40, 400))
            path = [*path, *(next(ids) for _ in range(dice.randint(1, 2)))]
            at += 3 + dice.expovariate(1 / 8)


def long_and_short(dice: random.Random, ids: Iterator[int], rate: float) -> Iterator[Asked]:
    at = 0.0
    while True:
        at += dice.expovariate(rate)
        if dice.random() < 0.8:
            blocks, output = dice.randint(1, 2), dice.randint(200, 600)
        else:
            blocks, output = dice.randint(16, 64), dice.randint(50, 200)
        yield Asked(at, [next(ids) for _ in range(blocks)], output)


LOADS: dict[str, Callable[[random.Random, Iterator[int], float], Iterator[Asked]]] = {
    "hot-and-cold": hot_and_cold,
    "tree-search": tree_search,
    "agents": agents,
    "long-and-short": long_and_short,
}


def write_trace(
    count: int, seed: int, path: Path, load: str = "hot-and-cold", rate: float = RATE
) -> None:
    """Write `count` requests, sorted by arrival, of which `rate` come per second."""
    dice = random.Random(f"{load}/{seed}")
    asked = list(itertools.islice(LOADS[load](dice, itertools.count(), rate), count))
    with path.open("w") as file:
        for each in sorted(asked, key=lambda each: each.at):
            record = {
                "timestamp": round(1000 * each.at),
                "input_length": len(each.blocks) * BLOCK - dice.randrange(BLOCK),
                "output_length": each.output,
                "hash_ids": each.blocks,
            }
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--load", choices=sorted(LOADS), default="hot-and-cold")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_trace(given.requests, given.seed, given.file, given.load)


if __name__ == "__main__":
    main()
