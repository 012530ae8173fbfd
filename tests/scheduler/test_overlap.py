"""Steps planned while others run, one promise per test."""

import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from rootlace.runtime.scheduler.masks import Job as MaskingJob
from rootlace.wire.errors import ConstraintNotMet, InternalError
from tests.scheduler.matchers import Digits, Plain, Script, Stepped
from tests.scheduler.planned_ahead import ahead, ids, launched
from tests.scheduler.test_forced import ANY, Fixed, Refusing
from tests.scheduler.world import World


def test_a_step_feeds_on_the_samples_of_the_one_under_way() -> None:
    world = ahead(block_size=4)
    prompts = [ids(9, 1), ids(6, 2), ids(3, 3)]
    for prompt in prompts:
        world.submit(prompt, 5)
    first, second = launched(world), launched(world)
    assert not len(first.feeds) and not second.late
    assert [sample.source for sample in second.samples] == second.feeds[:, 1].tolist()
    for (flat, source), sample in zip(second.feeds.tolist(), second.samples, strict=True):
        assert np.array_equal(sample.token_ids, first.samples[source].token_ids)
        assert second.positions[flat] == len(sample.token_ids)
    with pytest.raises(RuntimeError, match="two plans"):
        world.scheduler.plan()
    with pytest.raises(RuntimeError, match="oldest"):
        world.scheduler.commit(second, world.executor.collect(world.flights[0]))


def test_nothing_is_computed_for_nobody_where_the_end_is_known() -> None:
    for limit in (1, 2, 7):
        plain, overlapped = World(), ahead()
        for world in (plain, overlapped):
            for seed in range(3):
                world.submit(ids(5, seed), limit + seed)
            sizes = []
            while world.scheduler.has_work:
                plan = world.step()
                sizes.append(0 if plan is None else plan.num_tokens)
            assert sum(sizes) == 15 + 3 * (limit - 1) + 3, "one step for each token but the first"
            assert world.stats["steps"] == limit + 2
    assert len(ahead(context_length=12).run(ids(10), 9).output) == 2
    assert len(ahead(num_blocks=2, block_size=4).run(ids(5), 9).output) == 4


def test_a_stop_costs_one_row_and_changes_nothing() -> None:
    free = World(vocab_size=5).run([1, 2], 30).output
    stop = free[4]
    outcomes = []
    for world in (World(vocab_size=5), ahead(vocab_size=5)):
        rows = 0
        rid = world.submit([1, 2], 30, stop_token_ids=(stop,))
        while world.scheduler.has_work:
            plan = world.step()
            rows += 0 if plan is None else plan.num_rows
        job = world.jobs[rid]
        again = world.run([1, 2, *job.output, 3], 1)
        outcomes.append((job.output, job.finish, again.cached, world.stats["output_tokens"]))
        length = free.index(stop) + 1
        assert rows == length + world.overlap
        assert world.stats["dropped_samples"] == world.overlap
        world.expect_empty()
    assert outcomes[0] == outcomes[1]


def test_min_tokens_count_the_token_under_way() -> None:
    world = ahead(vocab_size=3)
    rid = world.submit([1, 2], 12, min_tokens=5, stop_token_ids=(0, 1, 2))
    plans = []
    while world.jobs[rid].finish is None:
        plan = world.step()
        plans += [] if plan is None else [plan]
    # Everything is a stop token: with all of them banned nothing can follow.
    assert world.jobs[rid].finish == "error"
    world = ahead(vocab_size=4)
    rid = world.submit([1, 2], 12, min_tokens=5, stop_token_ids=(0, 1))
    banned = []
    while world.jobs[rid].finish is None:
        plan = world.step()
        banned += [] if plan is None else [bool(sample.banned) for sample in plan.samples]
    assert banned[:6] == [True] * 5 + [False]
    world.expect_cold(world.jobs[rid])


def test_penalties_and_masks_of_the_host_are_late_and_automata_are_not() -> None:
    world = ahead(vocab_size=8, automata=True)
    makers: dict[str, Callable[[], Plain]] = {
        "stepped": partial(Stepped, 1, 20, 8, 0),
        "hidden": partial(Stepped, 1, 20, 8, 0, hidden=10),
        "script": partial(Script, 1, 20, 8, 0),
    }
    rids = {name: world.submit(ids(4, 1, 8), 9, constrain=make) for name, make in makers.items()}
    rids["free"] = world.submit(ids(4, 1, 8), 9)
    rids["penalised"] = world.submit(ids(4, 1, 8), 9, presence_penalty=0.5)
    rids["both"] = world.submit(ids(4, 1, 8), 9, presence_penalty=0.5, constrain=makers["stepped"])
    first, second = launched(world), launched(world)
    order = [sequence.rid for sequence, _ in world.scheduler._flights[1].sampled]
    for plan, late in ((first, set()), (second, {"hidden", "script", "penalised", "both"})):
        samples = dict(zip(order, plan.samples, strict=True))
        assert {name for name, rid in rids.items() if samples[rid].late} == late
        assert samples[rids["stepped"]].automaton is not None
        assert samples[rids["stepped"]].mask is None
    world.land()
    world.drain()
    world.expect_cold(*world.jobs.values())


def test_without_automata_on_the_device_every_constraint_is_late() -> None:
    world = ahead(vocab_size=8)
    world.submit([1], 9, constrain=partial(Stepped, 1, 20, 8, 0))
    first, second = launched(world), launched(world)
    assert first.samples[0].mask is not None and first.samples[0].automaton is None
    assert second.late and second.samples[0].automaton is None


def test_an_automaton_that_appears_is_taken_up_and_one_that_raises_is_not_missed() -> None:
    world = ahead(vocab_size=8, automata=True)
    matcher = Stepped(1, 30, 8, 0, hidden=10)
    rid = world.submit([1], 20, constrain=lambda: matcher)
    launched(world)
    assert launched(world).late
    matcher.hidden = 0
    world.land()  # its final row names the state
    assert not launched(world).late

    def broken() -> None:
        raise ValueError("a fault")

    matcher.automaton = broken  # type: ignore[method-assign, assignment]
    world.land()
    assert launched(world).late
    matcher.hidden = 0
    world.drain()
    fresh = world.jobs[rid]
    fresh.constrain = partial(Stepped, 1, 30, 8, 0)
    world.expect_cold(fresh)


class Lazy:
    """Filler that fills masks during the wait for them, and no sooner."""

    def start(self, jobs: Sequence[MaskingJob]) -> Callable[[], None]:
        for job in jobs:
            job.matcher.busy = True  # type: ignore[attr-defined]

        def wait() -> None:
            for job in jobs:
                job.matcher.busy = False  # type: ignore[attr-defined]
                job.run()

        return wait


class Watched:
    """Another matcher; notes what is asked of it while its mask is being filled."""

    def __init__(self, matcher: Plain, disturbed: list[str]) -> None:
        self.matcher, self.disturbed, self.busy = matcher, disturbed, False

    def __getattr__(self, name: str) -> object:
        if self.busy:
            self.disturbed.append(name)
        return getattr(self.matcher, name)


@pytest.mark.parametrize("seed", range(6))
def test_a_matcher_is_left_alone_while_its_mask_is_filled(seed) -> None:
    dice, disturbed = random.Random(seed), list[str]()
    world = ahead(vocab_size=6, filler=Lazy(), automata=bool(seed % 2), num_blocks=60)
    for _ in range(60):
        script, length = dice.randrange(9), dice.choice([3, 12])
        make: Callable[[], Plain] = partial(Script, script, length, 6, 4, dice.random() < 0.3)
        if dice.random() < 0.4:
            make = partial(Stepped, script, length, 6, 3, hidden=4)
        with contextlib.suppress(ConstraintNotMet):
            world.submit(
                ids(dice.randrange(1, 9), script, 6),
                dice.choice([3, 12]),
                constrain=lambda make=make: Watched(make(), disturbed),  # type: ignore[misc]
                jump=dice.random() < 0.5,
            )
        for _ in range(dice.randrange(3)):
            world.step()
        if dice.random() < 0.1:
            world.fail(InternalError("injected"))
        if dice.random() < 0.1 and world.scheduler._running.sequences[1:]:
            world.scheduler._running.preempt(world.scheduler._running.sequences[-1])
    world.drain()
    for job in world.jobs.values():
        if job.finish in ("stop", "length") or job.fails():
            world.expect_cold(job)
    assert world.late_rows > 30 and not disturbed


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_jump_drops_the_sample_behind_it_and_keeps_the_token_computed(logprobs) -> None:
    places = [ANY, ANY, 4, 5, 6, ANY, 4, ANY, ANY]
    computed = {}
    for world in (World(), ahead()):
        rid = world.submit([9, 8, 7], 40, constrain=lambda: Fixed(*places), logprobs=logprobs)
        tokens = 0
        while world.scheduler.has_work:
            plan = world.step()
            tokens += 0 if plan is None else plan.num_tokens
        world.expect_cold(world.jobs[rid])
        assert world.jobs[rid].forced == [2, 3, 4, 6]
        computed[world.overlap] = tokens
    # Wasted: the row behind the last token; with scores, the token before each jump, whose logits
    # are wanted after all.
    assert computed[True] - computed[False] == (3 if logprobs else 1)


def test_a_forced_end_behind_a_row_under_way() -> None:
    for logprobs in (False, True):
        world = ahead()
        job = world.run([9, 8], 40, constrain=lambda: Fixed(ANY, ANY, 4, 5), logprobs=logprobs)
        assert job.finish == "stop" and job.forced == [2, 3]
        world.expect_cold(job)
        world.expect_empty()


@pytest.mark.parametrize("jump", [False, True])
def test_a_rollback_drops_what_went_on_from_the_refused_token(jump) -> None:
    free = World(vocab_size=12).run([9] * 3, 3, constrain=lambda: Fixed(ANY, ANY, ANY)).output
    world = ahead(vocab_size=12, block_size=4)
    places = [ANY, ANY, 4, 4, 4, ANY, ANY]
    job = world.run([9] * 3, 40, jump=jump, constrain=lambda: Refusing(*places, bad=free[1]))
    assert world.stats["retreats"] >= 1
    world.expect_cold(job)
    world.expect_empty()


def test_a_fault_ends_the_requests_of_its_step_and_drops_the_one_behind() -> None:
    world = ahead(max_step_tokens=12, block_size=4)
    early = world.submit(ids(10, 1), 9)
    launched(world)
    late = world.submit(ids(7, 2), 9, prompt_logprobs_from=2, logprobs=True)
    assert launched(world).num_rows == 2
    world.fail(InternalError("injected"))
    assert world.jobs[early].finish == "error" and world.jobs[late].finish is None
    assert not world.flights and not world.scheduler._flights
    world.drain()
    world.expect_cold(world.jobs[late])
    (scores,) = [u.prompt_scores for u in world.jobs[late].updates if u.prompt_scores is not None]
    assert len(scores.logprobs) == 5
    world.expect_empty()


def test_a_dropped_step_waits_for_the_masks_of_those_who_go_on() -> None:
    waits: list[int] = []

    class Slow:
        def start(self, jobs):  # type: ignore[no-untyped-def]
            def wait() -> None:
                waits.append(len(jobs))
                for job in jobs:
                    job.run()

            return wait

    world = ahead(vocab_size=32, filler=Slow())
    world.submit([1], 9)
    launched(world)
    rid = world.submit([2], 9, constrain=lambda: Digits(5))
    plan = launched(world)
    assert plan.wait_for_masks is not None and not waits
    step = world.flights[0]
    world.executor.collect(step)
    world.take(world.scheduler.fail(step.plan, InternalError("injected")))
    assert waits == [1]
    world.flights.clear()
    world.executor._launched.clear()
    world.drain()
    assert world.jobs[rid].finish == "stop"


def test_what_is_under_way_counts_as_work() -> None:
    world = ahead()
    rid = world.submit(ids(5), 9)
    launched(world), launched(world)
    world.abort(rid)
    assert world.scheduler.has_work
    world.drain()
    assert world.stats["running"] == 0 and world.jobs[rid].output == []
    world.expect_empty()
