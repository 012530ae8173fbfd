"""Run the world of a scenario."""

import asyncio
import logging
from dataclasses import dataclass

from tests.deterministic.clock import Stuck, virtual
from tests.deterministic.scenario import Scenario
from tests.deterministic.violation import Violation
from tests.deterministic.world import World


@dataclass(frozen=True)
class Result:
    """Result of a world. `failure`: the broken promise, or empty. `digest`: hash of all events sent
    to clients. `deaths`: engines that ended. `handed`: blocks sent between engines. `restored`:
    tokens read back from disks."""

    operations: int
    virtual_seconds: float
    failure: str
    digest: str
    deaths: int
    handed: int
    restored: int


def run(scenario: Scenario) -> Result:
    logging.disable(logging.CRITICAL)
    world = World(scenario)
    failure = "it did not end"
    try:
        with virtual(world.loop, world.network.context(), world.disk, scenario.seed):
            world.loop.run_until_complete(world.live())
            failure = ""
    except (Violation, Stuck) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        _discard(world.loop)
        world.folder.cleanup()
        logging.disable(logging.NOTSET)
    operations = sum(len(actor.sent) for actor in world.actors)
    return Result(
        operations,
        world.loop.now,
        failure,
        world.digest.hexdigest(),
        len(world.deaths),
        world.handed,
        world.restored,
    )


def _discard(loop: asyncio.AbstractEventLoop) -> None:
    """End the tasks left by a failed world."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
