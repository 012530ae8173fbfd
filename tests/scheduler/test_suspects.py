"""Steps that fail: whoever makes them fail ends alone; all others get what they would have got."""

import contextlib
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.scheduler.output import MAX_ACCUSATIONS, Suspects
from rootlace.wire.errors import ConstraintNotMet, InternalError
from tests.scheduler.matchers import Script
from tests.scheduler.planned_ahead import ids
from tests.scheduler.world import World

VOCAB = 32


def drive(world: World, poison: dict[int, int], most_rows: int = 1000) -> list[int]:
    """Run everything to its end. A step fails that has a row of a request of `poison` with so many
    tokens, or over `most_rows` rows. Returns how many rows each failing step had."""

    def fails(plan: StepPlan) -> bool:
        contexts = zip(plan.rids.tolist(), plan.context_len.tolist(), strict=True)
        deadly = any(context >= poison.get(rid, 1 << 30) for rid, context in contexts)
        return deadly or plan.num_rows > most_rows

    failed = []
    for _ in range(20000):
        if not world.scheduler.has_work:
            return failed
        if world.overlap:
            while len(world.flights) < 2 and world.launch() is not None:
                pass
            if world.flights and fails(world.flights[0].plan):
                failed.append(world.flights[0].plan.num_rows)
                world.fail(InternalError("injected"))
            else:
                world.land()
            continue
        plan = world.scheduler.plan()
        world.take(world.scheduler.take_updates())
        if plan is None:
            continue
        if fails(plan):
            failed.append(plan.num_rows)
            world.take(world.scheduler.fail(plan, InternalError("injected")))
        else:
            world.take(world.scheduler.commit(plan, world.executor.run(plan)))
    raise AssertionError("no end")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whoever_makes_a_step_fail_ends_alone(seed: int, overlap: bool) -> None:
    dice = random.Random(seed)
    world = World(
        num_blocks=dice.choice([48, 200]),
        block_size=4,
        max_step_tokens=dice.choice([12, 64]),
        vocab_size=VOCAB,
        overlap=overlap,
    )
    stem = [token % VOCAB for token in ids(18, 3)]
    rids = []
    for i in range(9):
        prompt = stem[: dice.randrange(1, 18)] + [dice.randrange(VOCAB) for _ in range(i)]
        checked = dice.random() < 0.3
        constrain = partial(Script, i, 9, VOCAB, checking=checked) if i % 3 == 0 else None
        with contextlib.suppress(ConstraintNotMet):  # what is forced from the start may fail
            rids.append(
                world.submit(prompt, dice.choice([2, 9, 14]), constrain=constrain, jump=i % 2 == 0)
            )
    # Some in their prompts, some later, and some that end before.
    poison = {rid: dice.randrange(1, 25) for rid in dice.sample(rids, 4)}
    failed = drive(world, poison)
    ended = {rid for rid in rids if world.jobs[rid].finish == "error"}
    injected = {rid for rid in ended if world.jobs[rid].updates[-1].error == "injected"}
    assert injected <= poison.keys()
    assert failed.count(1) == len(injected), "nobody ends in company"
    for rid in set(rids) - injected:
        world.expect_cold(world.jobs[rid])
    world.expect_empty()


def test_what_only_fails_together_ends_too() -> None:
    world = World()
    rids = [world.submit(ids(5, i), 40) for i in range(4)]
    failed = drive(world, {}, most_rows=3)
    assert failed == [4] * (MAX_ACCUSATIONS + 1)
    assert {world.jobs[rid].finish for rid in rids} == {"error"}
    world.expect_empty()


def test_whoever_vanishes_from_a_failing_step_leaves_nobody_guilty() -> None:
    world = World(overlap=True)
    rids = [world.submit(ids(5, i), 4) for i in range(2)]
    world.launch()
    world.abort(rids[0])
    world.fail(InternalError("injected"))
    world.drain()
    world.expect_cold(world.jobs[rids[1]])


@pytest.mark.parametrize("overlap", [False, True])
def test_who_was_in_a_dead_engines_step_is_alone_until_there(overlap: bool) -> None:
    world = World(overlap=overlap, max_waiting=1)
    rids = [world.submit(ids(5, 0), 12), world.submit(ids(5, 1), 12, suspected=9)]  # none refused
    lengths = {rid: list[tuple[int, int]]() for rid in rids}
    for _ in range(60):
        plan = world.step()
        for rid, length in zip(plan.rids, plan.context_len, strict=True) if plan else ():
            assert plan is not None
            lengths[int(rid)].append((int(length), plan.num_rows))
    assert [rows for length, rows in lengths[rids[1]]][:5] == [1] * 5
    assert lengths[rids[1]][4] == (9, 1) and lengths[rids[0]][0] == (5, 2)
    world.expect_cold(*(world.jobs[rid] for rid in rids))


def test_strangers_wait_while_suspects_are_computed() -> None:
    world = World(max_step_tokens=64)
    rids = [world.submit(ids(9, i), 6) for i in range(3)]
    world.fail(InternalError("injected"))
    stranger = world.submit(ids(9, 7), 6)
    rows = []
    for _ in range(4):
        plan = world.step()
        assert plan is not None
        rows.append(sorted(plan.rids.tolist()))
    # Who is past the failing token goes on beside those who are not, and in no step with them.
    assert rows == [[0], [1], [2], [*rids, stranger]]
    world.drain()
    for rid in (*rids, stranger):
        world.expect_cold(world.jobs[rid])


def test_who_was_cleared_streams_while_suspects_are_computed() -> None:
    world = World(max_step_tokens=16)
    rids = [world.submit(ids(40 * (i + 1), i), 30, suspected=1) for i in range(4)]
    rows: list[list[int]] = []
    while any(not world.jobs[rid].output for rid in rids):
        plan = world.step()
        assert plan is not None
        rows.append(sorted(plan.rids.tolist()))
    assert [len(world.jobs[rid].output) for rid in rids] == sorted(
        (len(world.jobs[rid].output) for rid in rids), reverse=True
    )
    assert len(world.jobs[rids[0]].output) > 5
    for suspect in rids:  # nobody else is in a step of who is not cleared yet
        first = next(at for at, row in enumerate(rows) if suspect in row)
        assert rows[first] == [suspect]
    world.drain()
    world.expect_cold(*(world.jobs[rid] for rid in rids))
    world.expect_empty()


def test_suspects_without_room_beside_others_are_computed() -> None:
    world = World(num_blocks=16, max_step_tokens=16)
    rids = [world.submit(ids(30, i), 20, suspected=1) for i in range(5)]
    world.drain()
    world.expect_cold(*(world.jobs[rid] for rid in rids))
    world.expect_empty()


def test_a_later_fault_clears_nobody_of_an_earlier_one() -> None:
    def row() -> Any:
        return SimpleNamespace(finished=False, computed=3, length=5, accusations=0)

    def step(*rows: Any) -> Any:
        return SimpleNamespace(rows=rows)

    suspects, pair, other = Suspects(), (row(), row()), row()
    assert suspects.accuse(step(*pair)) == []
    assert suspects.first() is None, "both are as far as they were"
    assert suspects.accuse(step(other)) == [other]
    assert [who.accusations for who in pair] == [1, 1]
    # While they are computed alone, whoever fails alone was the culprit, and clears the others.
    suspects.accuse(step(*pair))
    assert suspects.accuse(step(pair[0])) == [pair[0]]
    assert [who.accusations for who in pair] == [0, 0]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs"])
def test_who_is_computed_alone_overtakes_those_who_came_before(policy: str) -> None:
    world = World(policy=policy, vocab_size=VOCAB)
    first = world.submit([1, 2, 3])
    suspect = world.submit([4, 5, 6], suspected=1)
    world.drain()
    assert [world.jobs[rid].finish for rid in (first, suspect)] == ["length", "length"]
