"""The figures of a run: rates, percentiles, rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rootlace.runtime.simulation.bounds import clairvoyant_bound
from rootlace.runtime.simulation.replay import Outcome
from rootlace.runtime.simulation.workload import Workload

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Report:
    """One policy on one cache size. Times in seconds; percentiles are (p50, p90, p99).

    `hit_rate`: of the prompt tokens of the requests that were served, `read_back` those of them
    that were read from below the pool. `clairvoyant_own_order`: the
    bound for the order in which this policy served them (None if it was not asked for).
    """

    policy: str
    cache_tokens: int
    requests: int
    refused: int
    hit_rate: float
    clairvoyant_own_order: float | None
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    waiting: tuple[float, ...]
    longest_wait: float
    longest_overtaking: int
    evicted_tokens: int
    retractions: int
    seconds: float
    busy: float
    steps: int
    requests_per_second: float
    output_tokens_per_second: float
    simulation_seconds: float
    read_back: float = 0.0

    def to_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("ttft", "tpot", "waiting"):
            row[name] = {f"p{p}": value for p, value in zip(PERCENTILES, row[name], strict=True)}
        return row


def report_on(
    workload: Workload, outcome: Outcome, simulation_seconds: float, own_order: bool = True
) -> Report:
    served = outcome.admitted
    outputs = workload.outputs[served]
    several = outputs > 1
    pace = outcome.decoding[served][several] / (outputs[several] - 1)
    prompts = int(workload.prompt_units[served].sum())
    seconds = max(outcome.seconds, 1e-9)
    return Report(
        policy=outcome.policy.name,
        cache_tokens=outcome.machine.cache_tokens,
        requests=len(workload),
        refused=len(workload) - len(served),
        hit_rate=int(outcome.cached[served].sum()) / max(prompts, 1),
        clairvoyant_own_order=clairvoyant_bound(
            workload, outcome.machine.cache_tokens // workload.granularity, served
        )
        if own_order
        else None,
        ttft=percentiles(outcome.first[served]),
        tpot=percentiles(pace),
        waiting=percentiles(outcome.waited[served]),
        longest_wait=float(outcome.waited[served].max(initial=0.0)),
        longest_overtaking=int(outcome.overtaken.max(initial=0)),
        evicted_tokens=outcome.evicted_tokens,
        retractions=outcome.retractions,
        seconds=outcome.seconds,
        busy=outcome.busy_seconds / seconds,
        steps=outcome.steps,
        requests_per_second=len(served) / seconds,
        output_tokens_per_second=int(outputs.sum()) / seconds,
        simulation_seconds=simulation_seconds,
        read_back=outcome.restored_tokens / max(prompts * workload.granularity, 1),
    )


def percentiles(values: np.ndarray) -> tuple[float, ...]:
    if not len(values):
        return (0.0,) * len(PERCENTILES)
    return tuple(np.percentile(values, PERCENTILES).tolist())
