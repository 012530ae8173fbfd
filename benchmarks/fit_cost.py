"""Fits the cost model of `rootlace simulate` to this machine: measured steps, least squares.

Steps of many shapes run through scheduler and model in this process, each several times, of which
the quickest counts (it was disturbed least). Errors are relative: a step of 5 ms counts as much as
one of 500 ms. Coefficients that come out negative are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ForeignLoad, environment, write_json
from rootlace.runtime.config import CacheConfig, ExecutorConfig, SchedulerConfig
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.simulation.cost import StepCost, read_cost
from rootlace.wire.protocol import SamplingParams

NAMES = ("step", "prefill", "decode", "context", "pair")

SHAPES = (
    # (requests, prompt tokens, output tokens)
    (1, 16, 4),
    (1, 256, 4),
    (1, 1024, 4),
    (1, 3500, 6),
    (4, 64, 6),
    (4, 1500, 6),
    (8, 256, 8),
    (16, 32, 8),
    (16, 300, 6),
    (32, 128, 8),
    (32, 200, 6),
    (64, 32, 6),
)


@dataclass(frozen=True)
class Fit:
    """`r_squared` of seconds; `error`: the median of |fitted - measured| / measured."""

    cost: StepCost
    r_squared: float
    error: float
    steps: int


def features(plan: Any) -> list[float]:
    """What a step does, in the order of `NAMES`."""
    counts = np.diff(plan.row_start).astype(np.float64)
    contexts = plan.context_len.astype(np.float64)
    decodes = counts == 1
    chunks = ~decodes
    pairs = counts[chunks] * (contexts[chunks] - counts[chunks] / 2)
    found = (1.0, counts[chunks].sum(), decodes.sum(), contexts[decodes].sum(), pairs.sum())
    return [float(value) for value in found]


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], **rest: Any) -> Fit:
    """Least squares of relative errors, without what would be negative."""
    work, took = np.array(rows), np.array(seconds)
    kept = list(range(len(NAMES)))
    while True:
        # Columns of equal size, so that none is lost to rounding.
        size = np.abs(work[:, kept]).max(axis=0)
        scaled = work[:, kept] / size / took[:, None]
        found = np.linalg.lstsq(scaled, np.ones(len(took)), rcond=None)[0] / size
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found * size)))
    values = np.zeros(len(NAMES))
    values[kept] = found
    fitted = work @ values
    residual = float(((took - fitted) ** 2).sum())
    spread = float(((took - took.mean()) ** 2).sum())
    coefficients: dict[str, Any] = dict(zip(NAMES, values.tolist(), strict=True))
    cost = StepCost(**coefficients, **rest)
    error = float(np.median(np.abs(fitted - took) / took))
    return Fit(cost, 1 - residual / max(spread, 1e-30), error, len(took))


def measure(
    model: Path, repeats: int, threads: int | None
) -> tuple[list[list[float]], list[float]]:
    """Features and seconds of every distinct step."""
    from rootlace.runtime.model.executor.runner import ModelRunner

    config = SchedulerConfig()
    tokens = max(count * (prompt + output) for count, prompt, output in SHAPES)
    cache = CacheConfig(num_blocks=tokens // CacheConfig().block_size + len(SHAPES) * 64)
    runner = ModelRunner.load(
        ExecutorConfig(model=str(model), threads=threads),
        cache,
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
    )
    rows: list[list[float]] = []
    rounds: list[list[float]] = []
    for _ in range(repeats):
        # All shapes in each round: a disturbance of some seconds then hits each shape once only.
        steps = [step for shape in SHAPES for step in _run(runner, config, cache, shape)]
        found = [row for row, _ in steps]
        if rows and found != rows:
            raise SystemExit("the same loads made other steps")
        rows = found
        rounds.append([seconds for _, seconds in steps])
    return rows, [min(times) for times in zip(*rounds, strict=True)]


def _run(
    runner: Any, config: SchedulerConfig, cache: CacheConfig, shape: tuple[int, int, int]
) -> Iterator[tuple[list[float], float]]:
    """Features and seconds of each step that the requests of a shape take."""
    count, prompt, output = shape
    scheduler = Scheduler(config, cache, runner.context_length, vocab_size=runner.vocab_size)
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=output, seed=0, ignore_eos=True)
    for rid in range(count):
        # The lower half of the ids may be special tokens.
        low, high = runner.vocab_size // 2, runner.vocab_size
        ids = random.integers(low, high, prompt, dtype=np.int32)
        scheduler.add(Request(rid=rid, token_ids=ids, params=params))
    start = time.perf_counter()
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, runner.run(plan))
        end = time.perf_counter()
        yield features(plan), end - start
        start = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cost model there")
    parser.add_argument("--name", default="", help="what to call the model in the file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    foreign, where = ForeignLoad(), environment()
    rows, seconds = measure(given.model, given.repeats, given.threads)
    busy = foreign.cores()
    machine = where["machine"]
    source = (
        f"Measured on {where['date'][:10]}: {given.name or given.model.resolve().name} on "
        f"{machine['cores']} cores of {machine['cpu']}, commit {where['commit']}"
    )
    found = fit(rows, seconds, max_step_tokens=SchedulerConfig().max_step_tokens, source=source)
    for key in NAMES:
        print(f"{key:8} {getattr(found.cost, key):.4g} s")
    print(
        f"{found.steps} steps, R² {found.r_squared:.4f}, median error {found.error:.1%}; "
        f"others kept {busy:.2f} cores busy"
    )
    if given.json is not None:
        quality = {
            "r_squared": round(found.r_squared, 5),
            "median_relative_error": round(found.error, 4),
            "steps": found.steps,
            "foreign_cores": round(busy, 2),
            "environment": where,
        }
        write_json(given.json, {**found.cost.to_json(), **quality})
        read_cost(str(given.json))


if __name__ == "__main__":
    main()
