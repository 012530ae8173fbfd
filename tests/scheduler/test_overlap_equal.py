"""Steps planned ahead give the same outputs, sooner."""

import contextlib
import random
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.wire.errors import ConstraintNotMet
from tests.scheduler.matchers import Plain, Script, Stepped
from tests.scheduler.planned_ahead import ahead, ids, launched
from tests.scheduler.world import Job, World
from tests.simulated_executor import BadPlan, CostModel, SimulatedExecutor


def load(world: World, seed: int) -> list[Job]:
    """Return requests of every kind, some of them submitted while others run."""
    dice = random.Random(seed)
    vocab = world.executor.vocab_size
    stems = [ids(dice.randrange(1, 20), i, vocab) for i in range(3)]
    for _ in range(30):
        limit = dice.choice([1, 3, 12, 40])
        make: Callable[[], Plain] | None = None
        kind, script = dice.randrange(6), dice.randrange(5)
        forcing = dice.choice([0, 3, 7])
        length = dice.choice([2, 9, 30])
        if kind == 0:
            make = partial(Script, script, length, vocab, forcing)
        elif kind == 1:
            make = partial(Script, script, length, vocab, forcing, True)
        elif kind == 2:
            make = partial(Stepped, script, length, vocab, forcing, hidden=dice.choice([0, 3]))
        prompt = [*dice.choice(stems), dice.randrange(vocab), dice.randrange(vocab)]
        logprobs = dice.random() < 0.3
        options = {
            "stop_token_ids": (0, 1) if dice.random() < 0.4 else (),
            "min_tokens": min(dice.choice([0, 0, 3]), limit),
            "frequency_penalty": 0.5 if dice.random() < 0.2 else 0.0,
            "logprobs": logprobs,
            "top_logprobs": 2 if logprobs else 0,
            "prompt_logprobs_from": dice.choice([None, None, 2]),
            "jump": dice.random() < 0.7,
        }
        for _ in range(dice.choice([0, 0, 1, 4])):
            world.step()
        with contextlib.suppress(ConstraintNotMet):  # what is forced from the start may fail
            world.submit(prompt, limit, constrain=make, **options)
    world.drain()
    return list(world.jobs.values())


@pytest.mark.slow
@pytest.mark.parametrize("automata", [False, True])
def test_with_and_without_overlap_the_same_comes_out(automata) -> None:
    for seed in range(8):
        sizes = {"block_size": 4, "num_blocks": 60 if seed % 2 else 400, "vocab_size": 7}
        off = World(**sizes)  # type: ignore[arg-type]
        on = ahead(automata=automata, **sizes)
        for a, b in zip(load(off, seed), load(on, seed), strict=True):
            assert (a.output, a.finish, a.forced) == (b.output, b.finish, b.forced)
            assert a.logprobs == b.logprobs
            assert a.updates[-1].matched == b.updates[-1].matched
            assert a.updates[-1].error == b.updates[-1].error
        for name in ("requests_stop", "requests_length", "output_tokens", "forced_tokens"):
            assert off.stats[name] == on.stats[name], name


def test_turns_of_a_conversation_find_the_same_cached() -> None:
    """One request at a time, with every way to end."""
    cached: dict[bool, list[object]] = {False: [], True: []}
    for world in (World(vocab_size=6, block_size=4), ahead(vocab_size=6, block_size=4)):
        history = ids(9, 1, 6)
        for turn in range(12):
            options: dict[str, object] = {"stop_token_ids": (turn % 6,)} if turn % 3 else {}
            if turn % 4 == 3:
                options["constrain"] = partial(Script, turn, 5, 6, 5, turn % 8 == 7)
            job = world.run(history, 6, **options)
            cached[world.overlap].append((job.cached, job.finish))
            history = [*history, *job.output, turn % 6]
        stats = world.stats
        cached[world.overlap].append([stats[n] for n in ("blocks_used", "tree_tokens")])
    assert cached[False] == cached[True]


def test_the_device_works_while_the_host_plans() -> None:
    """Four requests of equal length: with overlap a step takes the longer of the two, without
    their sum."""
    cost = CostModel(step=4e-3, token=0, context=0, copy=0, host=3e-3, host_row=0)
    seconds = {}
    for overlap in (False, True):
        world = World(overlap=overlap)
        world.executor._cost, world.executor._overlaps = cost, overlap
        for seed in range(4):
            world.submit(ids(5, seed), 100)
        world.drain()
        seconds[overlap] = world.executor.clock()
        assert world.executor.device_seconds == pytest.approx(100 * 4e-3)
    assert seconds[False] == pytest.approx(100 * 7e-3)
    assert seconds[True] == pytest.approx(100 * 4e-3 + 3e-3)


def test_the_simulated_executor_notices_wrong_sources() -> None:
    def spoilt(change: Callable[[StepPlan], StepPlan]) -> None:
        world = ahead(block_size=4)
        for seed in range(3):
            world.submit(ids(4 + seed, seed), 9)
        launched(world)
        plan = world.scheduler.plan()
        assert plan is not None
        world.flights.append(world.executor.launch(change(plan)))
        world.executor.collect(world.flights[0])
        world.executor.collect(world.flights[1])

    def replaced(plan: StepPlan, **fields: object) -> StepPlan:
        return msgspec.structs.replace(plan, **fields)  # type: ignore[arg-type]

    def resourced(plan: StepPlan) -> StepPlan:
        samples = [msgspec.structs.replace(sample, source=0) for sample in plan.samples]
        return msgspec.structs.replace(plan, samples=samples)

    spoilt(lambda plan: plan)
    for change in (
        lambda plan: replaced(plan, feeds=plan.feeds[:-1]),
        lambda plan: replaced(plan, feeds=np.stack((plan.feeds[:, 0], plan.feeds[::-1, 1]), 1)),
        resourced,
    ):
        with pytest.raises(BadPlan):
            spoilt(change)
    executor = SimulatedExecutor(8, 4)
    world = ahead()
    world.submit([1], 3)
    launched(world)
    plan = launched(world)
    with pytest.raises(BadPlan, match="not under way"):
        executor.launch(plan)
