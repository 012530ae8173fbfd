"""Time of decode steps and prompts of random Llama shapes, beside the device's ceilings.

The floor of a decode step is the time to copy its bytes, of a prompt the time of its products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.models import Bits, RandomModel, random_model
from benchmarks.gpu.paged import BLOCK_SIZE
from benchmarks.gpu.setting import Findings, Setting
from benchmarks.step_plans import decode_plans, random_tables, random_tokens, step_plan
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.executor.runner import ModelRunner

CONTEXT = 1024
BATCHES = (1, 64, 8, 256)
PROMPTS = (2048, 8192)
"""Tokens of the prompts that are measured, each in one step."""
WARM_UP = 60
"""Steps before the clock starts, in pairs with pauses: graphs are captured while serving, and
capturing may only take its share of the time."""
PAUSE = 0.25
RUNS = 3


def measure(setting: Setting, findings: Findings) -> None:
    """Measure each shape, with captured graphs and without, and with weights and cache of few bits:
    seconds per step of consecutive steps, without waits of the host for tokens."""
    shapes = ("smoke",) if setting.smoke else ("8B", "1B")
    forms: list[tuple[bool, Bits]] = [(True, "none"), (True, "int8"), (True, "int4")]
    # Targets come first, since the part may be cut short.
    for some in (forms[:1], forms[1:] if setting.quick else [*forms[1:], (False, "none")]):
        for name in shapes:
            with random_model(name, setting.device) as model:
                for graphs, bits in some:
                    with findings.attempt(shape=name, graphs=graphs, bits=bits):
                        _measure(setting, findings, model, graphs, bits)
                    setting.release()
            del model
            setting.release()


@torch.inference_mode()
def measure_prefill(setting: Setting, findings: Findings) -> None:
    """Measure one prompt in one step, to its first token. `flops`: of the products of its tokens
    and of attention's visible pairs, one row of the head."""
    for name in ("smoke",) if setting.smoke else ("8B", "1B"):
        with random_model(name, setting.device) as model:
            for count in setting.choose(PROMPTS, PROMPTS[:1], (24,)):
                with findings.attempt(shape=name, tokens=count) as case:
                    runner = model.runner(1, count + 1, graphs=False)
                    tables = random_tables(1, count, BLOCK_SIZE)
                    known = random_tokens(count, runner.vocab_size)
                    plan = step_plan(tables, BLOCK_SIZE, known, count)
                    seconds = []
                    for _ in range(setting.choose(5, 3, 2)):
                        setting.synchronize()
                        start = time.perf_counter()
                        runner.collect(runner.launch(plan))
                        seconds.append(time.perf_counter() - start)
                    flops = model.step_flops(count, count)
                    best = min(seconds)
                    case |= {"us": statistics.median(seconds[1:]) * 1e6, "best_us": best * 1e6}
                    case |= {"flops": flops, "tokens_per_second": count / best}
                    case["share"] = setting.share(flops / best, "matmul_rate")
                    del runner
                setting.release()
        del model
        setting.release()


def _measure(
    setting: Setting, findings: Findings, model: RandomModel, graphs: bool, bits: Bits
) -> None:
    batches = setting.choose(BATCHES if bits == "none" else (1, 64), (1, 64), (1, 2))
    warm_up, steps = setting.choose((WARM_UP, 100), (WARM_UP, 50), (2, 3))
    context = 20 if setting.smoke else CONTEXT
    total = 1 + warm_up + RUNS * steps  # warm-ups come in pairs
    runner = model.runner(max(batches), context + total + 1, graphs=graphs, bits=bits)
    fill(runner)
    replayed_all = graphs and setting.on_gpu
    for rows in batches:
        with findings.attempt(shape=model.name, graphs=graphs, bits=bits, rows=rows) as case:
            plans = decode_plans(rows, context, total, BLOCK_SIZE, runner.vocab_size)
            steps_run = TimedSteps(setting, runner, plans)
            steps_run.warm_up(warm_up, PAUSE if replayed_all else 0.0)
            before = replays(runner)
            seconds = statistics.median(steps_run.seconds_each(steps) for _ in range(RUNS))
            steps_run.end()
            replayed = replays(runner) - before
            if replayed_all and replayed < RUNS * steps:
                raise RuntimeError(f"only {replayed} of {RUNS * steps} steps went through a graph")
            moved = model.step_bytes(rows, context + warm_up + RUNS * steps // 2, bits)
            case |= {"context": context, "us": seconds * 1e6, "graph_replays": replayed}
            case |= {"bytes": moved, **against_floor(setting, seconds, moved)}


def against_floor(setting: Setting, seconds: float, moved: int) -> dict[str, Any]:
    """Return the ratio to the floor: the time of `moved` bytes at the measured copy bandwidth."""
    bandwidth = setting.ceilings.get("copy_bandwidth")
    if not bandwidth:
        return {"floor_us": None, "floor_share": None}
    floor = moved / bandwidth
    return {"floor_us": floor * 1e6, "floor_share": floor / seconds}


def replays(runner: ModelRunner) -> int:
    """Return how often a graph was launched so far."""
    return int(runner.stats().get("graph_replays", 0))


class TimedSteps:
    """Consecutive steps. Like the engine, launches a step before it collects the previous one, so
    that the device always has one waiting."""

    def __init__(self, setting: Setting, runner: ModelRunner, plans: Iterator[StepPlan]) -> None:
        self._setting, self._runner, self._plans = setting, runner, plans
        self._launched = runner.launch(next(plans))

    def seconds_each(self, count: int) -> float:
        runner = self._runner
        # Planned before: planning belongs to the scheduler and is measured elsewhere.
        coming = [next(self._plans) for _ in range(count)]
        self._setting.synchronize()
        start = time.perf_counter()
        for plan in coming:
            following = runner.launch(plan)
            runner.collect(self._launched)
            self._launched = following
        self._setting.synchronize()
        return (time.perf_counter() - start) / count

    def warm_up(self, count: int, pause: float) -> None:
        """Run `count` steps; with pauses, until graphs are replayed."""
        for _ in range(0, count, 2):
            before = replays(self._runner)
            self.seconds_each(2)
            if pause and replays(self._runner) - before < 2:
                time.sleep(pause)

    def end(self) -> None:
        self._runner.collect(self._launched)


@torch.inference_mode()
def fill(runner: ModelRunner) -> None:
    """Fill the cache with random numbers, or zeros for integers: unwritten memory may hold NaN."""
    for layer in runner.kv_cache:
        if layer.is_floating_point():
            layer.normal_()
        else:
            layer.zero_()
