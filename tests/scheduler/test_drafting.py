"""Drafts of predicted text: the output is the same as without drafts, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.plan import MAX_DRAFTED
from rootlace.runtime.scheduler import masks as masks_module
from rootlace.runtime.scheduler.drafter import Drafter, PredictedText
from rootlace.runtime.scheduler.masks import Job as Masking
from rootlace.runtime.scheduler.masks import StepMasks
from rootlace.wire.sampling import Cache, Handling
from tests.scheduler.matchers import Script, Stepped
from tests.scheduler.world import Job, World

Predict = Callable[[list[int]], list[int]]
PROMPT = [4, 5, 6]
LENGTH = 40


def edited(cold: list[int]) -> list[int]:
    """Edit an output: replace one token, drop two, and insert one."""
    return [*cold[:10], 99, *cold[11:20], 98, 97, *cold[20:25], *cold[26:]]


def told(job: Job) -> tuple[int, int]:
    return sum(len(u.accepted) for u in job.updates), sum(sum(u.rejected) for u in job.updates)


def ran(world: World, predict: Predict, **options: Any) -> tuple[Job, int]:
    """Run the request, check its output, and return it with its number of steps."""
    before = world.stats["steps"]
    job = world.run(PROMPT, LENGTH, predict=predict, **options)
    world.expect_cold(job)
    return job, int(world.stats["steps"] - before)


@pytest.mark.parametrize("overlap", [False, True])
def test_fewer_steps(overlap: bool) -> None:
    world = World(overlap=overlap)
    job, steps = ran(world, list)
    assert steps <= (12 if overlap else 6)
    assert told(job)[1] == 0 < told(job)[0]
    job, steps = ran(world, edited, logprobs=True)
    assert steps < 20
    accepted, rejected = told(job)
    assert accepted > LENGTH // 2 and rejected > 0
    stats = world.stats
    assert (
        stats["accepted_tokens"]
        < stats["drafted_tokens"]
        == sum(told(job)) + sum(told(world.jobs[0]))
    )
    world.expect_empty()


def test_what_does_not_come_is_not_drafted_for_long() -> None:
    job, _ = ran(World(), lambda cold: [90] * 200)
    accepted, rejected = told(job)
    assert rejected <= 24 and not accepted


predictions = st.lists(
    st.one_of(
        st.tuples(st.just("right"), st.integers(0, LENGTH), st.integers(0, LENGTH)),
        st.tuples(st.just("wrong"), st.integers(0, 99), st.integers(1, 3)),
    ),
    max_size=6,
)


def assembled(parts: list[tuple[str, int, int]], cold: list[int], vocab: int = 100) -> list[int]:
    found: list[int] = []
    for kind, a, b in parts:
        found += cold[a : a + b] if kind == "right" else [a % vocab] * b
    return found


@settings(max_examples=40)
@given(
    parts=st.lists(predictions, min_size=1, max_size=3),
    overlap=st.booleans(),
    stops=st.booleans(),
    min_tokens=st.sampled_from([0, 15]),
    max_tokens=st.sampled_from([1, 2, 17, LENGTH]),
    blocks=st.sampled_from([(4, 256), (4, 14), (1, 45), (16, 5)]),
    penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
    indexed=st.sampled_from([0, 32, 1000]),
)
def test_the_output_is_what_it_is_without(
    parts: list[list[tuple[str, int, int]]],
    overlap: bool,
    stops: bool,
    min_tokens: int,
    max_tokens: int,
    blocks: tuple[int, int],
    penalty: float,
    seed: int,
    indexed: int,
) -> None:
    """Drafts come from a prediction, and from the outputs of earlier requests."""
    world = World(
        overlap=overlap, block_size=blocks[0], num_blocks=blocks[1], speculation_tokens=indexed
    )
    if indexed:  # the same without a prediction, from then on known
        world.submit([*PROMPT, seed], max_tokens, frequency_penalty=penalty)
        world.drain()
    for part in parts:
        world.submit(
            [*PROMPT, seed],
            max_tokens,
            predict=partial(assembled, part),
            stop_token_ids=tuple(range(9)) if stops else (),
            min_tokens=min(min_tokens, max_tokens),
            frequency_penalty=penalty,
            logprobs=True,
            top_logprobs=1,
        )
    world.drain()
    world.expect_cold(*world.jobs.values())
    world.expect_empty()


@settings(max_examples=40)
@given(
    parts=predictions,
    script=st.integers(0, 5),
    forcing=st.sampled_from([0, 3, 7]),
    automata=st.booleans(),
    overlap=st.booleans(),
    jump=st.booleans(),
    logprobs=st.booleans(),
    stepped=st.booleans(),
    spot=st.sampled_from([0.0, 1e9]),
    draft_seconds=st.sampled_from([0.0, 1e9]),
    indexed=st.sampled_from([0, 1000]),
)
def test_constrained(
    parts: list[tuple[str, int, int]],
    script: int,
    forcing: int,
    automata: bool,
    overlap: bool,
    jump: bool,
    logprobs: bool,
    stepped: bool,
    spot: float,
    draft_seconds: float,
    indexed: int,
) -> None:
    kind = Stepped if stepped else Script
    world = World(
        overlap=overlap,
        automata=automata,
        vocab_size=7,
        spot_seconds=spot,
        draft_seconds=draft_seconds,
        speculation_tokens=indexed,
    )
    ran(
        world,
        partial(assembled, parts, vocab=7),
        constrain=lambda: kind(script, 30, 7, forcing),
        jump=jump,
        logprobs=logprobs,
    )
    world.expect_empty()


def test_a_constrained_row_is_drafted_along_its_constraint() -> None:
    """Forced text that was predicted is on the draft's way."""
    world = World(vocab_size=7, spot_seconds=1e9)
    job, steps = ran(world, list, constrain=lambda: Script(1, 30, 7, 3))
    assert job.forced and steps <= 8 and told(job)[1] <= 1
    checked, _ = ran(World(vocab_size=7), list, constrain=lambda: Script(1, 30, 7, 3, True))
    assert told(checked) == (0, 0)  # what may be taken back is not drafted


class Beside:
    """Filler that fills masks only during the wait for them."""

    def __init__(self) -> None:
        self.waiting = False

    def start(self, jobs: Sequence[Masking]) -> Callable[[], None]:
        def wait() -> None:
            self.waiting = True
            for job in jobs:
                job.run()
            self.waiting = False

        return wait


class Slow(Script):
    """Matcher with slow masks, none of which may be made during planning."""

    def __init__(self, filler: Beside) -> None:
        super().__init__(1, 30, 7, 3)
        self.filler = filler

    def fill_bitmask(self, out: np.ndarray) -> None:
        assert self.filler.waiting, "the loop made a mask that takes long"
        super().fill_bitmask(out)


def test_slow_masks_of_drafts_are_made_beside_the_step() -> None:
    filler = Beside()
    world = World(vocab_size=7, filler=filler)
    cold = ran(world, list, constrain=lambda: Script(1, 30, 7, 3))[0].output
    before, filler.waiting = world.stats["steps"], True
    rids = [
        world.submit(PROMPT, LENGTH, predict=lambda _: cold, constrain=lambda: Slow(filler))
        for _ in range(2)
    ]
    filler.waiting = False
    world.drain()
    for rid in rids:
        assert world.jobs[rid].output == cold
        assert told(world.jobs[rid])[0] > 15
    assert world.stats["steps"] - before <= 10


def test_a_draft_is_cut_where_its_masks_take_too_long() -> None:
    """The part of a cut draft that was computed in vain counts as rejected."""
    world = World(vocab_size=7, draft_seconds=0.0)
    job, steps = ran(world, list, constrain=lambda: Script(1, 30, 7, 3), jump=False)
    accepted, rejected = told(job)
    assert (accepted, rejected) == (0, world.stats["drafted_tokens"]) and rejected
    assert steps >= 30


class Stuck(Script):
    def rollback(self, count: int) -> None:
        raise RuntimeError("no way back")


@pytest.mark.parametrize("spot", [0.0, 1e9])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_constraint_that_does_not_go_back_ends_its_request_alone(
    spot: float, overlap: bool
) -> None:
    world = World(vocab_size=7, spot_seconds=spot, overlap=overlap)
    stuck = world.submit(PROMPT, LENGTH, predict=list, constrain=lambda: Stuck(1, 30, 7, 3))
    other = world.submit(PROMPT, LENGTH, predict=list, constrain=lambda: Script(2, 30, 7, 3))
    world.drain()
    last = world.jobs[stuck].updates[-1]
    assert (last.finish, last.code) == ("error", "internal") and "no way back" in last.error
    world.expect_cold(world.jobs[other])
    world.expect_empty()


def test_time_on_the_spot_is_the_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        thread_time = perf_counter

    class Tenth(Script):
        def fill_bitmask(self, out: np.ndarray) -> None:
            clock.now += 1e-5
            super().fill_bitmask(out)

    clock = Clock()
    monkeypatch.setattr(masks_module, "time", clock)
    masks = StepMasks(7, spot_seconds=2.5e-5)

    def made(matcher: Script) -> int:
        """Count the masks that are made at once for a draft of three tokens."""
        begun = clock.now
        found = [masks.at_hand(matcher, begun) is not None for _ in range(3)]
        masks.spend(begun)
        return sum(found)

    for _ in range(2):  # steps
        masks.begin_drafts()
        assert [made(Tenth(seed, 30, 7)) for seed in range(3)] == [3, 0, 0]
        found, wait = masks.start([Tenth(3, 30, 7)])
        assert len(found) == 1 and wait is None
    clock.now, quick = 1.0, Tenth(4, 30, 7)
    masks._slow.add(quick)
    masks.begin_drafts()
    assert made(quick) == 0


def test_samples_share_what_is_predicted_and_those_that_wait_follow_nothing() -> None:
    world = World(max_running=1)
    for seed in range(3):
        world.submit([*PROMPT, seed], LENGTH, predict=lambda _: list(range(50)))
    world.submit(PROMPT, LENGTH, predict=lambda _: [1, 2])
    checked = world.submit(
        PROMPT, LENGTH, predict=lambda _: [1, 2], constrain=lambda: Script(1, 30, 100, 3, True)
    )
    world.step()
    sequences = world.scheduler.by_rid
    texts = [sequences[rid].predicted for rid in range(4)]
    assert texts[0] is texts[1] is texts[2] is not texts[3] is not None
    for rid in range(4):
        text = texts[rid]
        assert text is not None and sequences[rid].request.prediction is text.ids
        assert (sequences[rid].drafter is not None) == (rid == 0)
    assert not len(sequences[checked].request.prediction)
    del texts, text, sequences
    world.drain()
    assert not world.scheduler._drafting.requests and not world.scheduler._drafting._texts


def test_an_abort_tells_what_was_drafted_in_vain() -> None:
    """An abort during a step reports rejected draft tokens; accepted ones come with the abort."""
    world = World(overlap=True)
    rid = world.submit(PROMPT, LENGTH, predict=list, emit_every=100)
    sequence = world.scheduler.by_rid[rid]
    for _ in range(9):
        if world.stats["accepted_tokens"] and sequence.draft is not None:
            break
        world.step()
    assert world.stats["accepted_tokens"] and sequence.draft is not None
    world.abort(rid)
    right = world.stats["accepted_tokens"]
    assert told(world.jobs[rid]) == (right, world.stats["drafted_tokens"] - right)
    world.expect_empty()


def test_accepted_are_the_tokens_that_were_predicted() -> None:
    world = World()
    job, _ = ran(world, edited)
    cold, at = job.output, 0
    for update in job.updates:
        for index, _ in update.accepted:
            assert cold[at + index] in edited(cold)
        assert len(update.accepted) in (len(update.token_ids) - 1, 0)  # the last one is sampled
        at += len(update.token_ids)


@pytest.mark.parametrize(("rows", "drafts"), [(4, True), (16, False)])
def test_a_full_batch_is_not_slowed_down(rows: int, drafts: bool) -> None:
    """A step takes as long as ten drafted tokens: shared by many rows, it is not worth one."""
    world = World(max_step_tokens=512)
    known(world, token=1e-3, step=1e-2)
    for at in range(rows):
        world.submit([*PROMPT, at], LENGTH, predict=list)
    world.drain()
    assert (world.stats["drafted_tokens"] > 0) == drafts


def test_drafts_come_back_when_a_full_batch_has_gone() -> None:
    """A row whose next token is planned ahead has no draft, so waiting rows must learn the new
    price."""
    world = World(overlap=True, max_step_tokens=512)
    known(world, token=1e-3, step=1e-2)
    for at in range(32):
        world.submit([*PROMPT, at], LENGTH, predict=list)
    world.submit([*PROMPT, 32], 8 * LENGTH, predict=list)
    while len(world.scheduler.by_rid) > 1:
        world.step()
    before = world.stats["drafted_tokens"]
    world.drain()
    assert world.stats["drafted_tokens"] > before


def known(world: World, token: float, step: float, fixed: float = 0.0) -> None:
    """Record the cost of tokens and steps, and of having drafts."""
    drafting = world.scheduler._drafting
    drafting.pace._steps = {1: step}
    took = [fixed + drafted * token for drafted in (1, 16)]
    sums = [2, 17, 257, sum(took), took[0] + 16 * took[1]]
    drafting.pace._sums = [1e6 * one for one in sums]
    drafting.note = lambda plan, seconds: None  # type: ignore[method-assign]


def test_rows_that_would_save_less_together_than_any_draft_costs_have_none() -> None:
    """Having drafts costs a whole step: eight rows' shares of it, for all rows together."""
    drafted = []
    for fixed in (0.0, 1e-2):
        world = World(max_step_tokens=512)
        known(world, token=2e-4, step=1e-2, fixed=fixed)
        for at in range(8):
            world.submit([*PROMPT, at], LENGTH, predict=lambda _: [90] * 200)
        world.drain()
        drafted.append(world.stats["drafted_tokens"])
    assert drafted[0] > 0 == drafted[1]


def test_a_draft_costs_a_row_what_its_step_took() -> None:
    """A row that got drafts in much longer steps gives up after fewer of these steps."""
    drafted = []
    for longer in (1.0, 4.0):
        world = World()
        known(world, token=1e-3, step=1e-2)
        drafting = world.scheduler._drafting

        def note(plan: object, seconds: float, times: float = longer) -> None:
            drafting._times = times  # noqa: B023

        drafting.note = note  # type: ignore[method-assign]
        world.run(PROMPT, LENGTH, predict=lambda cold: [t for t in cold for _ in range(2)])
        drafted.append(world.stats["drafted_tokens"])
    assert drafted[0] > drafted[1] > 0


def test_who_stands_by_misses_a_step_that_counts() -> None:
    """A row that stands by misses a step if other rows continue; a row that is alone misses
    nothing."""
    for others in (0, 1):
        world, missed = World(overlap=True), []
        known(world, token=1e-4, step=1e-2)
        rid = world.submit(PROMPT, LENGTH, predict=list)
        for at in range(others):
            world.submit([*PROMPT, at], 2 * LENGTH)
        while rid in world.scheduler.by_rid:
            sequence = world.scheduler.by_rid[rid]
            if sequence.drafter is not None:
                missed.append(sequence.drafter.missed)
            world.step()
        assert (max(missed) > 0) == bool(others)
        world.drain()
        world.expect_cold(*world.jobs.values())


def test_a_row_stands_by_where_that_saves_more_than_the_token_it_misses() -> None:
    world = World()
    drafting = world.scheduler._drafting
    prediction = Drafter(PredictedText(np.arange(100, dtype=np.int32)), 0)
    prediction.follow(np.arange(50, dtype=np.int32), 1)
    drafting._price = 0.3
    count, saves = prediction.worth(0.3)
    assert prediction.sure and count > 2
    for fixed, drafters, stands in ((0.0, 1, saves > 1), (9.0, 1, False), (9.0, 99, saves > 1.1)):
        drafting._fixed, drafting._drafters = fixed, drafters
        assert drafting._should_stand_by(prediction) == stands
    drafting._fixed, drafting._price = 0.0, 0.5
    count, saves = prediction.worth(0.5)
    assert count > 1 > saves and not drafting._should_stand_by(prediction)


def test_a_step_has_so_many_drafted_tokens_at_most() -> None:
    world = World(max_step_tokens=512)
    known(world, token=1e-9, step=1.0)
    for at in range(9):
        world.submit([*PROMPT, at], LENGTH, predict=list)
    most = 0
    while world.scheduler.has_work:
        plan = world.step()
        if plan is not None:
            most = max(most, len(plan.samples) - plan.num_rows)
    assert 9 * (MAX_DRAFTED // 9) - 9 <= most <= MAX_DRAFTED
    world.expect_cold(*world.jobs.values())


def test_it_goes_on_behind_what_another_engine_generated() -> None:
    world = World()
    (cold,) = [world.run(PROMPT, LENGTH).output]
    rid = world.submit(PROMPT, LENGTH, output=cold[:20], predict=list)
    before = world.stats["steps"]
    world.drain()
    assert world.jobs[rid].output == cold[20:]
    assert world.stats["steps"] - before <= 5


# What other requests hold -------------------------------------------------------------------------


def drafted(world: World, **options: Any) -> dict[str, int]:
    """Return the tokens, by source, that a request accepts of an earlier equal request."""
    before = world.stats
    world.expect_cold(world.run(PROMPT, LENGTH, **options))
    return {
        source: int(world.stats[f"accepted_{source}_tokens"] - before[f"accepted_{source}_tokens"])
        for source in ("prediction", "tree", "output")
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_what_another_request_generated_comes_in_fewer_steps(overlap: bool) -> None:
    world = World(overlap=overlap, speculation_tokens=1000)
    assert not drafted(world)["tree"]
    before = world.stats["steps"]
    assert drafted(world)["tree"] > LENGTH // 2
    assert world.stats["steps"] - before < LENGTH // 2
    accepted = [at for at, source in _accepted(world.jobs[1]) if source == 1]
    assert len(accepted) == world.stats["accepted_tree_tokens"]


def _accepted(job: Job) -> list[tuple[int, int]]:
    found, start = [], 0
    for update in job.updates:
        found += [(start + at, source) for at, source in update.accepted]
        start += len(update.token_ids)
    return found


def test_what_is_not_shared_is_not_drafted() -> None:
    """No drafts come from other namespaces or adapters, from texts with a time to live, or from
    deleted ones."""
    world = World(speculation_tokens=1000)
    assert not drafted(world, namespace="a")["tree"]
    assert not drafted(world, namespace="b")["tree"]
    assert not drafted(world, namespace="a", adapter="one")["tree"]
    assert drafted(world, namespace="a")["tree"]
    world.scheduler.cache.forget_namespace("a")
    assert not drafted(world, namespace="a")["tree"]
    assert drafted(world, namespace="b")["tree"]
    world.scheduler.cache.flush()
    assert not drafted(world, namespace="b")["tree"]
    for _ in range(2):
        assert not drafted(world, handling=Handling(cache=Cache(ttl=100.0)), namespace="c")["tree"]
    suffixes = world.scheduler.kv.suffixes
    assert suffixes is not None
    assert suffixes.owners == ["b"]
    pinned = Handling(cache=Cache(pin=True, ttl=100.0))  # whose time is the pin's
    assert [drafted(world, handling=pinned, namespace="d")["tree"] > 0 for _ in range(2)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("lost", ["evicted", "disabled", "failed"])
def test_a_namespace_without_kv_is_forgotten_too(lost: str) -> None:
    world = World(speculation_tokens=1000, enabled=lost != "disabled")
    drafted(world, namespace="a")
    if lost == "evicted":
        world.scheduler.kv.tree.flush()
    elif lost == "failed":
        world.scheduler.kv.reset()
    assert not world.scheduler.kv.tree.roots
    world.scheduler.cache.forget_namespace("a")
    assert not drafted(world, namespace="a")["tree"]


def test_what_ends_with_a_request_ends_with_one_that_is_aborted() -> None:
    world = World(speculation_tokens=1000)
    rid = world.submit(PROMPT, LENGTH, handling=Handling(cache=Cache(ttl=100.0)))
    world.step()
    suffixes = world.scheduler.kv.suffixes
    assert suffixes is not None and world.stats["indexed_tokens"] > 0
    world.abort(rid)
    assert not suffixes.owners and not world.stats["indexed_tokens"]


def test_a_prediction_that_is_wrong_gives_way_to_what_is_known() -> None:
    world = World(speculation_tokens=1000)
    drafted(world)
    assert drafted(world, predict=lambda cold: [90] * 200)["tree"] > LENGTH // 2


def test_what_does_not_pay_is_not_drafted() -> None:
    """A drafted token costs as much as a step: none is computed, whatever is known."""
    world = World(speculation_tokens=1000, max_step_tokens=512)
    known(world, token=1e-2, step=1e-2)
    for _ in range(2):
        drafted(world)
    assert not world.stats["drafted_tokens"]
