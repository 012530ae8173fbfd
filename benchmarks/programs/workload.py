"""Definition of a workload: one kind of program."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import rootlace as rl
from benchmarks.programs.texts import Texts

Row = tuple[Any, ...]
"""The arguments of a program."""


@dataclass(frozen=True)
class Workload:
    """A program, twice: for ourselves (`program`), and as requests to a server.

    Both ask for the same: `requests(client, *row)` has the prompts of `program(s, *row)`, token by
    token but for what was generated, of which there is as much. `rows(texts, source, count)` draws
    the arguments of so many programs; a batch has `batch`.
    """

    name: str
    describe: str
    batch: int
    program: rl.Function
    requests: Callable[..., Awaitable[Any]]
    rows: Callable[[Texts, random.Random, int], list[Row]]

    def draw(self, texts: Texts, seed: int | str, count: int) -> list[Row]:
        return self.rows(texts, random.Random(f"{self.name}/{seed}"), count)
