"""Worlds in which a step is planned while another is under way."""

import random

from rootlace.runtime.contracts.plan import StepPlan
from tests.scheduler.world import World


def ids(count: int, seed: int = 0, vocab: int = 100) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


def ahead(**options: object) -> World:
    return World(overlap=True, **options)  # type: ignore[arg-type]


def launched(world: World) -> StepPlan:
    plan = world.launch()
    assert plan is not None
    return plan
