"""A trace of a made-up load in Mooncake's format, for `rootlace simulate`.

It has what a public trace lacks: prompts that many requests share, while a queue is waiting. Nine
of ten requests share one of four long prefixes ("hot") and are cheap once it is cached; the tenth
shares nothing ("cold").
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

BLOCK = 512
RATE = 10.0
"""Requests per second."""


def write_trace(count: int, seed: int, path: Path) -> None:
    """Write `count` requests, sorted by arrival."""
    dice = random.Random(f"hot-and-cold/{seed}")
    ids = itertools.count()
    hot = [[next(ids) for _ in range(16)] for _ in range(4)]
    arrivals = list(itertools.accumulate(dice.expovariate(RATE) for _ in range(count)))
    with path.open("w") as file:
        for at in arrivals:
            if dice.random() < 0.9:
                blocks = [*dice.choice(hot), next(ids)]
            else:
                blocks = [next(ids) for _ in range(dice.randint(4, 12))]
            record = {
                "timestamp": round(1000 * at),
                "input_length": len(blocks) * BLOCK - dice.randrange(BLOCK),
                "output_length": dice.randint(16, 200),
                "hash_ids": blocks,
            }
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_trace(given.requests, given.seed, given.file)


if __name__ == "__main__":
    main()
