"""Forced tokens and rollbacks under pressure: the output equals that of a single request."""

import contextlib
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from rootlace.runtime.scheduler.admission import Headroom
from rootlace.wire.errors import ConstraintNotMet, InternalError
from tests.scheduler.matchers import Asked, Plain, Script, Stepped
from tests.scheduler.world import World

VOCAB = 4


def pressed(seed: int, block_size: int, overlap: bool) -> World:
    """A random load of constrained requests, with faults, until all have ended."""
    dice = random.Random(seed)
    world = World(
        block_size=block_size,
        num_blocks=dice.choice([48, 96, 400]) // block_size,
        context_length=dice.choice([40, 300]),
        vocab_size=VOCAB,
        enabled=dice.random() < 0.85,
        max_step_tokens=dice.choice([3, 7, 64]),
        max_running=dice.choice([3, 8]),
        policy=dice.choice(["lpm", "fcfs", "dfs"]),
        overlap=overlap,
        automata=dice.random() < 0.7,
        headroom=Headroom(least=0.0),
    )
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
            world.scheduler._running.preempt(dice.choice(world.scheduler._running.sequences[1:]))
            world.scheduler.check()
        else:
            world.step()
    world.drain()
    return world


def submit_some(world: World, dice: random.Random, stems: list[list[int]]) -> None:
    script = dice.randrange(8)
    length, forcing = dice.choice([3, 12, 30]), dice.choice([3, 6, 9])
    checking = dice.random() < 0.4
    make: Callable[[], Plain] = partial(Script, script, length, VOCAB, forcing, checking)
    if dice.random() < 0.3:
        make = partial(Stepped, script, length, VOCAB, forcing - 3, hidden=dice.choice([0, 4]))
    prompt = [*dice.choice(stems)[: dice.randrange(1, 13)], dice.randrange(VOCAB)]
    for _ in range(dice.choice([1, 3])):
        logprobs = dice.random() < 0.4
        with contextlib.suppress(ConstraintNotMet):  # what is forced from the start may fail
            world.submit(
                prompt,
                dice.choice([2, 9, 40]),
                constrain=make,
                jump=dice.random() < 0.8,
                frequency_penalty=1.0 if dice.random() < 0.1 else 0.0,
                stop_token_ids=(1,) if dice.random() < 0.2 else (),
                min_tokens=dice.choice([0, 0, 2]),
                logprobs=logprobs,
                top_logprobs=2 if logprobs else 0,
                prompt_logprobs_from=dice.choice([None, None, 0, 2]),
            )


def abort_one(world: World, dice: random.Random) -> None:
    """While steps are under way."""
    if len(world.flights) < 2:
        world.launch()
    if world.open_rids():
        world.abort(dice.choice(world.open_rids()))
    if not world.overlap:
        world.land()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_outputs_flags_and_scores_under_pressure(block_size, overlap) -> None:
    seen = dict.fromkeys(("jumps", "retreats", "retractions", "copies", "evicted_blocks"), 0)
    ends: set[str] = set()
    late = 0
    for seed in range(8):
        world = pressed(seed, block_size, overlap)
        late += world.late_rows
        for job in world.jobs.values():
            assert job.finish is not None
            ends.add(job.updates[-1].code or job.finish)
            if job.finish in ("stop", "length") or job.fails():
                world.expect_cold(job)
        for name in seen:
            seen[name] += int(world.stats[name])
        world.expect_empty()
    assert min(seen[name] for name in seen if block_size > 1 or name != "copies") > 5, seen
    assert ends == {"stop", "length", "abort", "internal", "constraint_not_met"}
    assert (late > 20) == overlap


# ---------------------------------------------------------------- one promise per test


class Fixed(Plain):
    """Exactly these tokens may come; a list inside is a choice."""

    def __init__(self, *places: int | list[int]) -> None:
        self.places = [[place] if isinstance(place, int) else place for place in places]
        self.at = 0

    def fill_bitmask(self, out: np.ndarray) -> None:
        out[:] = 0
        for token in self.places[self.at] if self.at < len(self.places) else ():
            out[token // 32] |= np.int32(1) << np.int32(token % 32)

    def advance(self, token_id: int) -> bool:
        allowed = token_id in self.places[self.at]
        self.at += allowed
        return allowed

    def is_finished(self) -> bool:
        return self.at == len(self.places)

    def forced_tokens(self) -> list[int]:
        run: list[int] = []
        for place in self.places[self.at :]:
            if len(place) > 1:
                break
            run += place
        return run


def steps_of(world: World, *places: int | list[int], **params: object) -> list[int]:
    """Tokens computed in each step of one request."""
    rid = world.submit([9, 8, 7], 40, constrain=lambda: Fixed(*places), **params)  # type: ignore[arg-type]
    sizes = []
    while world.jobs[rid].finish is None:
        plan = world.step()
        sizes.append(0 if plan is None else plan.num_tokens)
    world.expect_cold(world.jobs[rid])
    return sizes


ANY = [1, 2, 3]


def test_forced_tokens_share_a_step_with_the_position_that_samples_next() -> None:
    assert steps_of(World(), ANY, 4, 5, 6, ANY, ANY) == [3, 4, 1]
    assert steps_of(World(), ANY, 4, 5, 6, ANY, ANY, jump=False) == [3, 1, 1, 1, 1, 1]
    world = World()
    assert steps_of(world, 4, 5, ANY, ANY, 6) == [5, 1], "from the start: with the prompt"
    assert world.jobs[0].updates[0].token_ids[:2] == (4, 5)
    assert world.jobs[0].finish == "stop", "without a step for the last one"
    assert steps_of(World(), 4, 5, 6) == [5], "nothing is sampled"
    assert World().run([1], 40, constrain=lambda: Fixed(ANY, 4)).forced == [1]


def test_scores_of_a_forced_end_cost_one_step_and_come_in_line() -> None:
    sizes = steps_of(World(), ANY, 4, 5, 6, logprobs=True, top_logprobs=2)
    assert sizes == [3, 3], "the last token's logits are wanted by nobody"
    world = World()
    job = world.run([9, 8], 40, constrain=lambda: Fixed(4, 5, ANY), logprobs=True, top_logprobs=3)
    (update,) = job.updates
    assert update.scores is not None and update.scores.top_ids.shape == (3, 3)
    assert update.forced == (0, 1)


@pytest.mark.parametrize("logprobs", [False, True])
def test_limits_cut_a_forced_run(logprobs) -> None:
    whole = [4, 5, 6, 7, 8, 9, 10, 11]
    for limit in range(1, 9):
        job = World().run([1, 2], limit, constrain=lambda: Fixed(*whole), logprobs=logprobs)
        assert job.output == whole[:limit]
        assert job.finish == ("stop" if limit == len(whole) else "length")
    # The whole pool: 8 tokens have KV, and the last one needs none.
    world = World(num_blocks=2, block_size=4)
    job = world.run([1, 2, 3], 40, constrain=lambda: Fixed(*whole), logprobs=logprobs)
    assert (job.output, job.finish) == (whole[:6], "length")
    job = world.run([1, 2, 3], 40, constrain=lambda: Fixed(ANY, *whole), logprobs=logprobs)
    assert (job.output[1:], job.finish) == (whole[:5], "length")
    world.expect_empty()
    job = World(context_length=6).run([1, 2, 3], 40, constrain=lambda: Fixed(*whole))
    assert (job.output, job.finish) == (whole[:3], "length")


def test_a_stop_token_in_forced_text_stops_and_min_tokens_keeps_it_out() -> None:
    def run(*places: int | list[int], **params: int) -> tuple[list[int], str | None, object]:
        job = World().run([1], 9, constrain=lambda: Fixed(*places), stop_token_ids=(5,), **params)
        return job.output, job.finish, job.updates[-1].matched

    assert run(4, 5, 6) == ([4, 5], "stop", 5)
    assert run(4, 5, 6, min_tokens=1) == ([4, 5], "stop", 5)
    # Nothing else spells what is forced here: no token can follow, as without a jump.
    _output, finish, _ = run(4, 5, 6, min_tokens=2)
    assert finish == "error"
    assert run(4, [5, 6], 7, min_tokens=2) == ([4, 6, 7], "stop", None)


def test_samples_of_one_prompt_compute_what_is_forced_once() -> None:
    world = World(block_size=4)
    for _ in range(3):
        world.submit([9] * 10, 40, constrain=lambda: Fixed([1], *[4] * 20, ANY, ANY))
    first, second = world.step(), world.step()
    assert first is not None and first.num_tokens == 10 + 21 + 2
    assert second is not None and second.num_tokens == 3
    world = World(block_size=4)
    for last in (4, 5, 6):  # they differ behind the run
        world.submit([9] * 10, 40, constrain=lambda t=last: Fixed(ANY, *[7] * 20, t, ANY))
    world.step()
    plan = world.step()
    assert plan is not None and plan.num_tokens == 1 + 20 + 3
    world.drain()
    world.expect_cold(*world.jobs.values())


def test_a_jump_never_computes_again_what_the_sequence_has() -> None:
    world = World(block_size=4)
    long = world.submit([9] * 5, 40, constrain=lambda: Fixed(*[[4, 5]] * 6, *[7] * 9, ANY, ANY))
    for _ in range(5):
        world.step()
    # Somebody else's path through its first outputs ends inside them, in the tree.
    world.run([9] * 5 + world.jobs[long].output[:2] + [3, 3], 1)
    before = world.stats["computed_tokens"]
    plan = world.step()
    assert plan is not None and plan.num_tokens == 10
    assert world.stats["computed_tokens"] - before == 10
    world.drain()
    world.expect_cold(world.jobs[long])


class Refusing(Fixed):
    """Matcher that refuses `bad` after the next token, which takes both back."""

    can_rollback = True

    def __init__(self, *places: int | list[int], bad: int, tries: int = 3) -> None:
        super().__init__(*places)
        self.bad, self.tries, self.seen = bad, tries, [-1]

    def advance(self, token_id: int) -> bool:
        if self.seen[-1] == self.bad or not super().advance(token_id):
            return False
        self.seen.append(token_id)
        return True

    def rollback_refused(self) -> int | None:
        self.tries -= 1
        if self.tries < 0 or self.places[self.at - 1] == [self.bad]:
            return None
        self.at -= 1
        self.seen.pop()
        self.places[self.at] = [t for t in self.places[self.at] if t != self.bad]
        return 1


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("jump", [False, True])
def test_a_rollback_computes_one_token_again(logprobs, jump) -> None:
    world = World(block_size=4, vocab_size=12)
    free = world.cold([9, 9, 9], world.run([9, 9, 9]).params, lambda: Fixed(ANY, ANY, ANY)).output
    places = [ANY, ANY, 4, 4, 4, 4, 4, ANY]
    rid = world.submit(
        [9, 9, 9],
        40,
        jump=jump,
        logprobs=logprobs,
        constrain=lambda: Refusing(*places, bad=free[1]),
    )
    before = world.stats["computed_tokens"]
    world.drain()
    job = world.jobs[rid]
    world.expect_cold(job)
    assert job.finish == "stop" and job.output[1] != free[1]
    assert [len(update.token_ids) for update in job.updates] == [8], (
        "nothing is told before the end"
    )
    assert world.stats["retreats"] == 1
    # In chunks: the prompt's last token, the one before the place of the rollback, the forced run.
    assert world.stats["computed_tokens"] - before == 1 + 1 + (6 if jump else 0)
    if jump:
        assert job.forced == [2, 3, 4, 5, 6]
    world.expect_empty()


def test_rollback_end_honestly() -> None:
    world = World()
    job = world.run([1, 2], 9, constrain=lambda: Refusing(ANY, [4], 5, bad=4))
    assert (job.finish, job.output) == ("error", [])
    assert (job.updates[-1].code, job.updates[-1].error) == ("constraint_not_met", "refused")
    stats = world.stats
    with pytest.raises(ConstraintNotMet, match="refused"):
        world.submit([1, 2], 9, constrain=lambda: Refusing(3, 4, 5, bad=4))
    assert world.stats == {**stats, "requests_refused": stats["requests_refused"] + 1} | {
        "forced_tokens": world.stats["forced_tokens"],
        "jumps": world.stats["jumps"],
    }
    world.expect_empty()


class Panic(BaseException):
    """Exception that looks like a panic of a compiled library."""


@pytest.mark.parametrize("error", [ValueError, Panic])
@pytest.mark.parametrize("method", ["advance", "forced_tokens", "is_finished", "fill_bitmask"])
def test_a_matcher_that_raises_fails_alone(method, error) -> None:
    world = World(vocab_size=VOCAB)
    script = Asked(3, 14, VOCAB, 6)
    healthy = 1 if method == "fill_bitmask" else 4
    calls = 0

    def broken(*given: object) -> object:
        nonlocal calls
        calls += 1
        if calls > healthy:
            raise error("a fault")
        return getattr(Script, method)(script, *given)

    setattr(script, method, broken)
    other = world.submit([1, 2, 3], 20, constrain=partial(Script, 4, 9, VOCAB, 6), jump=True)
    try:
        rid = world.submit([1, 2, 3], 20, constrain=lambda: script, jump=True, logprobs=True)
    except InternalError:
        pass  # it failed at what is forced from the start
    else:
        world.drain()
        assert world.jobs[rid].finish == "error"
    assert calls == healthy + 1
    world.drain()
    assert world.jobs[other].finish in ("stop", "length")
    world.expect_cold(world.jobs[other])


def test_an_interrupted_request_goes_on_elsewhere() -> None:
    """From any point that its client has seen, the rest is the same, including scores."""
    prompt, cases = [1, 2, 3], 0
    for seed in range(12):
        whole = World(vocab_size=VOCAB)
        job = whole.run(
            prompt, 20, constrain=partial(Script, seed, 14, VOCAB, 6), logprobs=True, top_logprobs=1
        )
        if job.finish == "error":
            continue
        seen = 0
        for update in job.updates[:-1]:
            seen += len(update.token_ids)
            world = World(vocab_size=VOCAB)
            rid = world.submit(
                prompt,
                20,
                output=job.output[:seen],
                constrain=partial(Script, seed, 14, VOCAB, 6),
                logprobs=True,
                top_logprobs=1,
            )
            world.drain()
            resumed = world.jobs[rid]
            assert resumed.output == job.output[seen:] and resumed.finish == job.finish
            assert resumed.logprobs == job.logprobs[seen:]
            assert [at + seen for at in resumed.forced] == [at for at in job.forced if at >= seen]
            cases += 1
    assert cases > 10
