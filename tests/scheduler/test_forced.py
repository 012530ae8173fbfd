"""Forced tokens and retreats under pressure: what comes out is what one request alone would get."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rootlace.errors import ConstraintNotMet, InternalError
from rootlace.runtime.engine.simulated import history_hash, made_up_logprobs
from rootlace.runtime.scheduler import running
from tests.scheduler.matchers import Plain, Script
from tests.scheduler.world import World

VOCAB = 4


def pressed(seed: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> World:
    """A random load of constrained requests, with faults, until all have ended."""
    dice = random.Random(seed)
    monkeypatch.setattr(running, "_LEAST_RESERVE", 0.0)
    world = World(
        block_size=block_size,
        num_blocks=dice.choice([48, 96, 400]) // block_size,
        context_length=dice.choice([40, 300]),
        vocab_size=VOCAB,
        enabled=dice.random() < 0.85,
        max_step_tokens=dice.choice([3, 7, 64]),
        max_running=dice.choice([3, 8]),
        policy=dice.choice(["lpm", "fcfs", "dfs"]),
    )
    world.scheduler._running.reserve = 0.0
    stems = [[dice.randrange(VOCAB) for _ in range(12)] for _ in range(2)]
    for _ in range(150):
        if len(world.open_rids()) < 12 and len(world.jobs) < 40:
            submit_some(world, dice, stems)
        event = dice.random()
        if event < 0.02:
            world.fail(InternalError("injected"))
        elif event < 0.05 and world.open_rids():
            abort_one(world, dice)
        elif event < 0.08:
            world.scheduler.kv.tree.evict(dice.randrange(1, 6))
        elif event < 0.11 and len(world.scheduler._running.sequences) > 1:
            world.scheduler._running.retract(dice.choice(world.scheduler._running.sequences[1:]))
            world.scheduler.check()
        else:
            world.step()
    world.drain()
    return world


def submit_some(world: World, dice: random.Random, stems: list[list[int]]) -> None:
    script = dice.randrange(8)
    length, forcing = dice.choice([3, 12, 30]), dice.choice([3, 6, 9])
    checking = dice.random() < 0.4
    prompt = dice.choice(stems)[: dice.randrange(1, 13)] + [dice.randrange(VOCAB)]
    for _ in range(dice.choice([1, 3])):
        logprobs = dice.random() < 0.4
        try:
            world.submit(
                prompt,
                dice.choice([2, 9, 40]),
                constrain=lambda: Script(script, length, VOCAB, forcing, checking),
                jump=dice.random() < 0.8,
                stop_token_ids=(1,) if dice.random() < 0.2 else (),
                min_tokens=dice.choice([0, 0, 2]),
                logprobs=logprobs,
                top_logprobs=2 if logprobs else 0,
                prompt_logprobs_from=dice.choice([None, None, 0, 2]),
            )
        except ConstraintNotMet:
            pass  # what is forced from the start may fail its check


def abort_one(world: World, dice: random.Random) -> None:
    """While a step is under way."""
    plan = world.scheduler.plan()
    world.take(world.scheduler.take_updates())
    if world.open_rids():
        world.abort(dice.choice(world.open_rids()))
    if plan is not None:
        world.take(world.scheduler.commit(plan, world.executor.run(plan)))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_outputs_flags_and_scores_under_pressure(block_size, monkeypatch) -> None:
    seen = dict.fromkeys(("jumps", "retreats", "retractions", "copies", "evicted_blocks"), 0)
    ends: set[str] = set()
    for seed in range(40):
        world = pressed(seed, block_size, monkeypatch)
        for job in world.jobs.values():
            assert job.finish is not None
            ends.add(job.updates[-1].code or job.finish)
            if job.finish in ("stop", "length") or job.fails():
                world.expect_cold(job)
        for name in seen:
            seen[name] += int(world.stats[name])
        world.expect_empty()
    assert min(seen[name] for name in seen if block_size > 1 or name != "copies") > 20, seen
    assert ends == {"stop", "length", "abort", "internal", "constraint_not_met"}
