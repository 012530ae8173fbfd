"""Measurements of a workload: every engine in turns, a batch at once, then one by one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.common import ForeignLoad
from benchmarks.programs.client import Encoder
from benchmarks.programs.engines import Engine, ideal_of
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Workload

PATIENCE = 15.0
"""Seconds: what took an engine more it does not repeat."""


@dataclass(frozen=True)
class Turn:
    """One run of a workload on an engine: seconds of the batch (`wall_s`), mean seconds of a
    program that runs alone (`latency_s`), tokens of the batch, cores that other programs kept busy.

    `prompt_tokens`: of the program's requests to our runtime; `engine_prompt_tokens`: of the
    requests to this engine. `ideal_computed_tokens`: left by an unlimited cache with our requests.
    """

    engine: str
    workload: str
    repetition: int
    programs: int
    wall_s: float
    latency_s: float
    prompt_tokens: int
    ideal_computed_tokens: int
    engine_prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    foreign_cores: float

    @property
    def each_s(self) -> float:
        """Return seconds of the batch over its programs."""
        return self.wall_s / self.programs


def measure(
    workloads: Sequence[Workload],
    engines: Sequence[Engine],
    texts: Texts,
    encoder: Encoder,
    repetitions: int,
    scale: float,
    alone: int,
    seconds: float,
) -> Iterator[Turn]:
    """Measure: every repetition has separate rows, and another engine first. After `seconds` only
    the first repetition of a workload begins."""
    slow: set[tuple[str, str]] = set()
    end = time.monotonic() + seconds
    for repetition, workload in itertools.product(range(repetitions), workloads):
        if repetition and time.monotonic() > end:
            break
        batch = max(2, round(workload.batch * scale))
        rows = workload.draw(texts, repetition, batch + alone)
        left = [engine for engine in engines if (engine.name, workload.name) not in slow]
        first = repetition % len(left)
        for engine in [*left[first:], *left[:first]]:
            with engine.awake():
                engine.flush()
                load = ForeignLoad()
                done = engine.run(workload, rows[:batch])
                engine.flush()
                lone = [engine.run(workload, [row]).seconds for row in rows[batch:]]
                foreign = load.cores()
            if done.seconds + sum(lone) > PATIENCE:
                slow.add((engine.name, workload.name))
            ideal = ideal_of(workload, rows[:batch], encoder)
            yield Turn(
                engine=engine.name,
                workload=workload.name,
                repetition=repetition,
                programs=batch,
                wall_s=done.seconds,
                latency_s=fmean(lone),
                prompt_tokens=ideal.prompt_tokens,
                ideal_computed_tokens=ideal.prompt_tokens - ideal.cached_tokens,
                engine_prompt_tokens=done.prompt,
                computed_tokens=done.computed,
                output_tokens=done.output,
                foreign_cores=round(foreign, 3),
            )


def warm_up(
    workloads: Sequence[Workload],
    engines: Sequence[Engine],
    texts: Texts,
    progress: Callable[[str], None],
) -> None:
    """Run a program of each kind, for compilation and allocation at the first use."""
    for engine in engines:
        with engine.awake():
            for workload in workloads:
                engine.run(workload, workload.draw(texts, "warm-up", 2)[:1])
        progress(f"{engine.name}: warm")
