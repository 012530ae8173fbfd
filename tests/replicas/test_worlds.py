"""Several engines in one world on a virtual clock: who dies, and who goes on."""

import msgspec
import pytest

from rootlace.runtime.routing.router import BelowPools
from tests.deterministic.cli import short
from tests.deterministic.run import Result, run
from tests.deterministic.scenario import Fault, Program, Scenario, Shape, draw
from tests.deterministic.world import World


def story(client: int, text: str = "the red cat", seconds: float = 0.0) -> Program:
    return Program(
        client,
        seconds,
        (
            ("open", 1, None, {}),
            ("append", 1, (("text", text),)),
            ("generate", 1, {"max_tokens": 40, "temperature": 1.0, "seed": 5, "stream": True}),
            ("wait", 1),
        ),
    )


def ran(scenario: Scenario) -> Result:
    result = run(scenario)
    assert not result.failure, short(result.failure)
    return result


@pytest.mark.parametrize("seed", [1, 4, 24])
def test_what_is_promised_holds_with_several_engines(seed: int) -> None:
    """Seed 24 kills one engine for good while the other one is being started again."""
    scenario = draw(seed, programs=30 if seed == 24 else 12)
    ran(
        msgspec.structs.replace(scenario, shape=msgspec.structs.replace(scenario.shape, replicas=2))
    )


def test_what_pins_again_is_the_business_of_its_own_engine() -> None:
    """One that was started again dies while it pins what the one before had pinned."""
    scenario = draw(57, programs=20)
    shape = msgspec.structs.replace(scenario.shape, replicas=3, blocks=40)
    ran(msgspec.structs.replace(scenario, shape=shape))


@pytest.mark.parametrize(("seed", "by"), [(13, "memory"), (19, "tcp")])
def test_and_where_some_of_them_compute_prompts_for_the_others(seed: int, by: str) -> None:
    scenario = draw(seed, programs=15)
    shape = msgspec.structs.replace(
        scenario.shape, replicas=3, prefill=1, by=by, blocks=60, state=False
    )
    assert ran(msgspec.structs.replace(scenario, shape=shape)).handed > 10


def test_and_where_each_has_a_disk_below_its_pool() -> None:
    """One engine dies while something is written, and the next one finds what was there."""
    scenario = draw(8, programs=10)
    shape = msgspec.structs.replace(scenario.shape, replicas=2, blocks=32, disk=40)
    result = ran(msgspec.structs.replace(scenario, shape=shape))
    assert result.restored and result.deaths


@pytest.mark.parametrize(
    "faults",
    [
        (Fault(0.02, "kill", 0.0), Fault(0.03, "kill", 0.001)),  # one, and then the other
        (Fault(0.02, "die", 0.1),),
        (Fault(0.02, "suspend", 0.99),),
    ],
)
def test_streams_go_on_at_another_engine(faults: tuple[Fault, ...]) -> None:
    shape = Shape(clients=4, replicas=2)
    programs = tuple(story(client, f"the red cat {client}" * 3) for client in range(4))
    calm = ran(Scenario(0, shape, programs))
    shaken = ran(Scenario(0, shape, programs, faults))
    assert shaken.deaths > calm.deaths


def test_a_request_goes_on_while_its_engine_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes seconds to come back; nobody waits for it."""
    ended: list[float] = []
    settle = World._settle

    async def note(world: World) -> None:
        ended.extend(at for times in world.told.values() for at in times)
        await settle(world)

    monkeypatch.setattr(World, "_settle", note)
    for replicas, most in ((1, 10.0), (2, 0.19)):
        ended.clear()
        ran(
            Scenario(
                0,
                Shape(clients=1, replicas=replicas),
                (story(0),),
                (Fault(0.02, "kill", 0.0),),
            )
        )
        took = max(ended) - min(ended)
        assert took < most, replicas
        assert replicas == 2 or took > 0.19, "an engine takes so long to start"


def test_what_lies_on_disks_is_asked_for_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven prompts, twice, one after the other: two pools have room for two of them each."""
    shape = Shape(clients=1, replicas=2, blocks=40, disk=400)
    asked = [story(0, f"{at} the cat and the blue cat name the age. " * 3) for at in range(7)]
    programs = tuple(
        msgspec.structs.replace(program, start=0.2 * at) for at, program in enumerate(2 * asked)
    )
    knowing = ran(Scenario(0, shape, programs))
    monkeypatch.setattr(BelowPools, "match", lambda *_: [])
    blind = ran(Scenario(0, shape, programs))
    assert knowing.restored > 1.5 * blind.restored
