"""Records of one engine's run of one workload."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ForeignLoad
from benchmarks.peers.drive import Driven
from benchmarks.peers.workloads import Tokens, Workload


@dataclass(frozen=True)
class Task:
    """A workload of one repetition. `scale` is the whole run's."""

    model: str
    workload: str
    seed: int
    repetition: int
    scale: float
    vocab_size: int

    def make(self, part: float = 1.0) -> Workload:
        return Workload(self.workload, self.seed, self.scale * part, self.vocab_size)


def tasks_of(
    name: str, model: Path, workloads: Sequence[str], seed: int, repetitions: int, scale: float
) -> list[Task]:
    """Return every workload on a model, each repetition with the next seed."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    return [
        Task(name, workload, seed + repetition, repetition, scale, vocab)
        for workload in workloads
        for repetition in range(repetitions)
    ]


@dataclass(frozen=True)
class Row:
    """One run of a workload on an engine. Seconds, tokens, cores.

    `ttft_mean_s`: from submitting a request until its client has the first token. `cpu_s`: CPU time
    of all processes of the engine, and of this one if it drives the engine itself. `foreign_cores`:
    cores that other programs kept busy meanwhile. `scale` below 1: a part of the workload.
    """

    engine: str
    model: str
    workload: str
    seed: int
    repetition: int
    scale: float
    wall_s: float
    ttft_mean_s: float | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    foreign_cores: float
    cpu_s: float = 0.0
    fixed_replies: bool = False
    outputs: dict[str, Tokens] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, engine: str, task: Task, scale: float, driven: Driven, load: ForeignLoad) -> Row:
        """Make a row; `load` was measured while the engine was driven."""
        return cls(
            engine=engine,
            model=task.model,
            workload=task.workload,
            seed=task.seed,
            repetition=task.repetition,
            scale=scale,
            wall_s=driven.wall,
            ttft_mean_s=statistics.mean(driven.ttft) if driven.ttft else None,
            requests=len(driven.outputs),
            prompt_tokens=driven.prompt_tokens,
            output_tokens=sum(map(len, driven.outputs.values())),
            cached_tokens=driven.cached,
            foreign_cores=round(load.cores(), 3),
            cpu_s=load.own_seconds(),
            fixed_replies=driven.fixed_replies,
            outputs=driven.outputs,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row without its tokens, which would be most of the file."""
        return {name: value for name, value in asdict(self).items() if name != "outputs"}
