"""Bounds on the cost of steps: no request waits long for a long prompt, or for many requests. Time
is that of the simulated executor, so that a slow machine changes nothing."""

import random
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineRequest, Pooling
from rootlace.runtime.scheduler.admission import Turns
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.pacing import MeasuredCost
from rootlace.runtime.scheduler.request import RequestState
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import SamplingParams
from tests.scheduler.world import World
from tests.simulated_executor import CostModel, SimulatedExecutor

BOUND = 0.25
SLOW = CostModel(step=8e-3, token=1.5e-3, context=2e-7)
"""Cost of a small model on two cores."""
VOCABULARY = 1000


@dataclass
class Load:
    """Requests that are there from the beginning: prompts, outputs, tokens scored from where."""

    requests: list[tuple[list[int], int, int | None]]
    connections: int = 1
    pooling: Pooling = "none"

    def __iter__(self) -> Iterator[tuple[int, EngineRequest]]:
        for number, (prompt, outputs, scored) in enumerate(self.requests):
            params = SamplingParams(
                max_tokens=outputs, seed=number, temperature=0.0, prompt_logprobs_from=scored
            )
            origin = (f"connection {number * self.connections // len(self.requests)}",)
            ids = np.array(prompt, np.int32)
            yield (
                number,
                EngineRequest(
                    number, ids, params, client="proxy", origin=origin, pooling=self.pooling
                ),
            )


def _prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(length)]


def _load(name: str) -> Load:
    dice = random.Random(name)
    if name == "prompt":
        return Load([(_prompt(dice, 4000), 1, None)])
    if name == "prompts":
        return Load([(_prompt(dice, 2000), 1, None) for _ in range(6)], connections=6)
    if name == "select":
        shared = _prompt(dice, 50)
        return Load([(shared + _prompt(dice, 3), 0, 50) for _ in range(1024)])
    if name == "echo":
        return Load([(_prompt(dice, 3000), 0, 0)])
    if name == "vectors":
        return Load([(_prompt(dice, 1500), 0, None) for _ in range(3)], pooling="mean")
    assert name == "samples"
    prompts = [_prompt(dice, 40) for _ in range(16)]
    return Load([(prompts[at // 48], 12, None) for at in range(16 * 48)], connections=16)


LOADS = ("prompt", "prompts", "select", "echo", "vectors", "samples")


class Run:
    """Load, with single tokens requested beside it at random moments, one after another."""

    def __init__(
        self, load: Load, bound: float, cost: CostModel, *, beside: bool = True, before: int = 0
    ) -> None:
        """`before`: how many single tokens without a prompt were computed before the load comes."""
        self.executor = SimulatedExecutor(4096, 16, 8192, VOCABULARY, cost)
        self.scheduler = Scheduler(
            SchedulerConfig(step_seconds=bound),
            CacheConfig(num_blocks=4096),
            8192,
            self.executor.clock,
            vocab_size=VOCABULARY,
        )
        for number in range(before):
            params = SamplingParams(max_tokens=1, seed=0)
            ids = np.array([number % VOCABULARY], np.int32)
            self.scheduler.add(EngineRequest(2_000_000 + number, ids, params))
            plan = self.scheduler.plan()
            assert plan is not None
            self.scheduler.commit(plan, self.executor.run(plan))
        self.outputs: dict[int, list[int]] = {}
        self.steps: list[float] = []
        self.waits: list[float] = []
        self.end = 0.0
        left = set()
        for number, request in load:
            self.scheduler.add(request)
            left.add(number)
        dice = random.Random(7)
        asked: tuple[float, int] | None = None
        following, due = 1_000_000, self.executor.clock() + 2.4 * bound
        while left:
            began = self.executor.clock()
            if beside and asked is None and due <= began:
                following += 1
                ids = np.array([5, *_prompt(dice, 20)], np.int32)
                params = SamplingParams(max_tokens=1, seed=0)
                self.scheduler.add(
                    EngineRequest(following, ids, params, client="proxy", origin=("other",))
                )
                asked = due, following
            plan = self.scheduler.plan()
            assert plan is not None
            updates = self.scheduler.commit(plan, self.executor.run(plan))
            now = self.executor.clock()
            self.steps.append(now - began)
            for update in updates:
                self.outputs.setdefault(update.rid, []).extend(update.token_ids)
                if update.finish is None:
                    continue
                assert update.finish == "length"
                if update.rid in left:
                    left.discard(update.rid)
                    self.end = now
                elif asked is not None:
                    self.waits.append(now - asked[0])
                    due, asked = now + dice.uniform(0.05, 0.4), None


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("slower", [1, 10])
@pytest.mark.parametrize(("before", "sample"), [(0, 1e-3), (200, 0.0)])
def test_a_single_token_waits_for_no_load(
    load: str, slower: int, before: int, sample: float
) -> None:
    """With ten times slower steps the bound is ten times larger. Sampling costs nothing, or two
    thirds of a token. Many single tokens say nothing of prompts; prompt tokens behind them soon
    prove five times as expensive as on other machines."""
    cost = replace(
        SLOW,
        step=SLOW.step * slower,
        token=SLOW.token * slower,
        context=SLOW.context * slower,
        sample=sample * slower,
    )
    if before:
        cost = replace(cost, context=9e-7 * slower)  # without instructions for dot products
    run = Run(_load(load), BOUND * slower, cost, before=before)
    assert len(run.waits) >= 5 or slower > 1
    if run.waits:
        assert statistics.median(run.waits) <= 2 * BOUND * slower
        assert max(run.waits) <= 3 * BOUND * slower
    assert statistics.median(run.steps) <= BOUND * slower * 1.05
    assert max(run.steps) <= BOUND * slower * 1.1


@pytest.mark.parametrize("load", ["prompt", "echo"])
@pytest.mark.parametrize("before", [0, 200])
@pytest.mark.parametrize("tokens", [2, 3, 10, 40])
def test_nothing_is_known_of_prompts_at_first(load: str, before: int, tokens: int) -> None:
    """Reading the weights takes as long as computing `tokens` tokens, unlike the prior's 5."""
    cost = replace(SLOW, token=SLOW.step / tokens)
    run = Run(_load(load), BOUND, cost, before=before)
    assert max(run.steps) <= 1.5 * BOUND, run.steps[:8]
    assert max(run.waits, default=0.0) <= 3 * BOUND


def test_rows_take_turns_only_where_that_costs_little() -> None:
    """Enough rows to make a step's own cost small continue together, for any time."""
    dice = random.Random(5)
    requests = [([dice.randrange(VOCABULARY)], 20, None) for _ in range(128)]
    rows: dict[float, float] = {}
    for step in (1e-3, 0.1):
        cost = CostModel(step=step, token=5e-3, context=0.0)
        run = Run(Load(requests), BOUND, cost, beside=False, before=20)
        assert all(len(ids) == 20 for ids in run.outputs.values())
        rows[step] = max(run.steps[8:]) / cost.token
    assert rows[1e-3] < 60, "of 128 rows, which take 0.64 s, each step has a part"
    assert rows[0.1] > 128, "all go on together: half of them would take 0.42 s instead of 0.74"


def test_a_step_of_one_alone_is_nobodys_turn() -> None:
    """A suspect that is computed alone between two parts does not begin the turns anew."""
    world = World(block_size=4, num_blocks=400, step_seconds=0.02)
    for number in range(40):
        world.submit([number, 5], 200)
    for _ in range(60):
        world.step()
    running, measured = world.scheduler._running, MeasuredCost(64)
    for rows in (1, 20, 1, 20):
        measured.note((1.0, 0.0, rows, 0.0, 0.0, 0), 1e-5 + 5e-3 * rows)
    turns, seen = Turns(0.02, measured), set[int]()
    alone = running.sequences[10]
    for _ in range(400):
        assert running.secure(alone, turns=turns) == [alone]
        part = running.secure(alone, others=True, turns=turns)
        assert part is not None and len(part) < 39
        seen |= {one.order for one in part}
    assert len(seen) == len(running.sequences) - 1


def test_the_last_rows_are_for_clients_that_have_none() -> None:
    """A client's own requests fill fifteen rows of sixteen; another one's find a row at once."""
    executor = SimulatedExecutor(4096, 16, 8192, VOCABULARY, SLOW)
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND, max_running=32),
        CacheConfig(num_blocks=4096),
        8192,
        executor.clock,
        vocab_size=VOCABULARY,
    )
    params = SamplingParams(max_tokens=1000, seed=0)
    for number in range(40):
        ids = np.array([number, 5], np.int32)
        scheduler.add(EngineRequest(number, ids, params, client="one"))

    def run(steps: int) -> set[int]:
        seen = set()
        for _ in range(steps):
            plan = scheduler.plan()
            assert plan is not None
            seen |= {update.rid for update in scheduler.commit(plan, executor.run(plan))}
        return seen

    assert len(run(10)) == 30
    scheduler.add(EngineRequest(99, np.array([7, 5], np.int32), params, client="other"))
    assert 99 in run(2)


def test_kept_rows_are_not_kept_twice() -> None:
    """A client with a row gets another one in its turn, while ever new ones come."""
    executor = SimulatedExecutor(8192, 16, 1 << 16, VOCABULARY, SLOW)
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND, max_running=32, policy="fcfs"),
        CacheConfig(num_blocks=8192),
        1 << 16,
        executor.clock,
        vocab_size=VOCABULARY,
    )
    number = 0

    def send(client: str, outputs: int) -> int:
        nonlocal number
        number += 1
        ids = np.array([number % 7, 5], np.int32)
        params = SamplingParams(max_tokens=outputs, seed=0)
        scheduler.add(EngineRequest(number, ids, params, client=client))
        return number

    send("a", 10_000)
    others = {send(f"other {at}", 50 + at % 20) for at in range(90)}
    second, ended = 0, 0
    for step in range(1000):
        if step == 100:
            second = send("a", 5)
        plan = scheduler.plan()
        assert plan is not None
        for update in scheduler.commit(plan, executor.run(plan)):
            if second and update.rid == second:
                assert ended < 150, "two rounds of those who wait"
                return
            if update.finish is not None and update.rid in others:
                ended += bool(second)
                others.add(send(f"other {number}", 50 + number % 20))
    raise AssertionError("the second request of a client was never begun")


def test_short_requests_before_their_turn_take_nobodys_share() -> None:
    """A key with fifty connections, each with one short request after another, and a key that sends
    all requests at once: both get half."""
    executor = SimulatedExecutor(8192, 16, 1 << 16, VOCABULARY, SLOW)
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND, policy="fcfs"),
        CacheConfig(num_blocks=8192),
        1 << 16,
        executor.clock,
        vocab_size=VOCABULARY,
    )
    dice, owner = random.Random(5), dict[int, str]()

    def send(client: str, connection: str) -> None:
        number = len(owner)
        owner[number] = client
        ids = np.array(_prompt(dice, 20), np.int32)
        params = SamplingParams(max_tokens=2, seed=0)
        scheduler.add(
            EngineRequest(number, ids, params, client=client, origin=("address", connection))
        )

    for _ in range(1500):
        send("one", "only")
    for at in range(50):
        send("many", f"connection {at}")
    ended = Counter[str]()
    for _ in range(200):
        plan = scheduler.plan()
        assert plan is not None
        for update in scheduler.commit(plan, executor.run(plan)):
            if update.finish is not None:
                ended[owner[update.rid]] += 1
                if owner[update.rid] == "many":
                    send("many", f"connection {len(owner) % 50}")
    assert 0.45 <= ended["one"] / ended.total() <= 0.55 and ended.total() > 800, ended


@pytest.mark.parametrize(
    ("rows", "blocks", "length"), [(4, 8192, 1000), (8, 8192, 1000), (64, 220, 2600)]
)
def test_a_long_prompt_waits_for_no_end_of_short_ones(rows: int, blocks: int, length: int) -> None:
    """Whether rows or blocks are scarce: sixty clients send one short request after the other."""
    executor = SimulatedExecutor(blocks, 16, 1 << 15, VOCABULARY, SLOW)
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND, max_running=rows),
        CacheConfig(num_blocks=blocks),
        1 << 15,
        executor.clock,
        vocab_size=VOCABULARY,
    )
    dice, owner = random.Random(1), dict[int, str]()

    def send(client: str, tokens: int, outputs: int) -> None:
        number = len(owner)
        owner[number] = client
        ids = np.array(_prompt(dice, tokens), np.int32)
        params = SamplingParams(max_tokens=outputs, seed=0)
        scheduler.add(EngineRequest(number, ids, params, client=client))

    for at in range(60):
        send(f"short {at}", 20, 30 + at % 7)
    ended = Counter[str]()
    for step in range(1000):
        if step == 30:
            send("long", length, 1)
        plan = scheduler.plan()
        assert plan is not None
        for update in scheduler.commit(plan, executor.run(plan)):
            if update.finish is not None:
                client = owner[update.rid]
                ended[client] += 1
                if client == "long":
                    assert max(ended.values()) <= 2, "as many rounds of those who wait"
                    return
                send(client, 20, 30 + int(client.split()[1]) % 7)
    raise AssertionError("the long prompt was never begun")


def test_few_are_looked_at_for_a_short_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of inspected requests is bounded, with any number of clients whose prompts no step
    ends."""
    executor = SimulatedExecutor(8192, 16, 1 << 15, VOCABULARY, SLOW)
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND),
        CacheConfig(num_blocks=8192),
        1 << 15,
        executor.clock,
        vocab_size=VOCABULARY,
    )
    dice, looks = random.Random(1), 0
    estimate = KVStore.estimate

    def counted(self: KVStore, sequence: RequestState) -> int:
        nonlocal looks
        looks += 1
        return estimate(self, sequence)

    monkeypatch.setattr(KVStore, "estimate", counted)
    for number in range(400):
        ids = np.array(_prompt(dice, 600), np.int32)
        params = SamplingParams(max_tokens=2, seed=0)
        scheduler.add(EngineRequest(number, ids, params, client=f"key {number}"))
    for _ in range(20):
        looks = 0
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, executor.run(plan))
        assert looks < 400


@pytest.mark.parametrize("length", [60, 120, 500, 900])
def test_a_short_prompt_goes_beside_two_long_ones(length: int) -> None:
    """Of three keys, two send one long prompt after another."""
    executor = SimulatedExecutor(8192, 16, 1 << 16, VOCABULARY, SLOW)
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND),
        CacheConfig(num_blocks=8192),
        1 << 16,
        executor.clock,
        vocab_size=VOCABULARY,
    )
    dice, number = random.Random(3), 0
    running: dict[int, str] = {}

    def send(client: str, tokens: int) -> int:
        nonlocal number
        number += 1
        running[number] = client
        ids = np.array(_prompt(dice, tokens), np.int32)
        params = SamplingParams(max_tokens=1, seed=0)
        scheduler.add(EngineRequest(number, ids, params, client=client))
        return number

    waits: list[float] = []
    asked = None
    for step in range(400):
        for client in ("a", "b"):
            if client not in running.values():
                send(client, 4000)
        if step > 20 and asked is None:
            asked = executor.clock(), send("c", length)
        plan = scheduler.plan()
        assert plan is not None
        for update in scheduler.commit(plan, executor.run(plan)):
            if update.finish is not None:
                del running[update.rid]
                if asked is not None and update.rid == asked[1]:
                    waits.append(executor.clock() - asked[0])
                    asked = None
    # A third of each step is the short prompt's.
    work = 3 * length * SLOW.token
    assert len(waits) > 3 and max(waits) <= work + 8 * BOUND, max(waits)


@pytest.mark.parametrize("step", [0.1, 0.3, 1.5])
def test_a_large_model_spends_little_on_steps_themselves(step: float) -> None:
    """A model whose steps exceed the bound with any work spends as much on steps as on 5 tokens."""
    cost = replace(SLOW, step=step, token=step / 5)
    ends = [Run(_load("prompt"), bound, cost, beside=False).end for bound in (BOUND, 0.0)]
    assert ends[1] / ends[0] >= 0.8, ends


@pytest.mark.parametrize("load", LOADS)
def test_the_load_gets_as_much_as_in_long_steps_and_the_same_tokens(load: str) -> None:
    bounded = Run(_load(load), BOUND, SLOW, beside=False)
    whole = Run(_load(load), 0.0, SLOW, beside=False)
    assert bounded.outputs == whole.outputs
    assert whole.end / bounded.end >= 0.9
    assert max(whole.steps) > 4 * BOUND, "the load is one that would stop everybody"


@pytest.mark.parametrize("pauses", [1, 2, 5, 10])
@pytest.mark.parametrize("seconds", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("rows", [0, 20])
def test_a_machine_that_stood_still_changes_no_step_for_long(
    pauses: int, seconds: float, rows: int
) -> None:
    """The machine may stand still repeatedly, with and without decode rows."""
    executor = SimulatedExecutor(8192, 16, 1 << 17, VOCABULARY, SLOW)
    held = 0.0
    scheduler = Scheduler(
        SchedulerConfig(step_seconds=BOUND),
        CacheConfig(num_blocks=8192),
        1 << 17,
        lambda: executor.clock() + held,
        vocab_size=VOCABULARY,
    )
    params = SamplingParams(max_tokens=2000, seed=0)
    for number in range(rows):
        scheduler.add(EngineRequest(number, np.array([number], np.int32), params))
    ids = np.array(_prompt(random.Random(1), 60_000), np.int32)
    scheduler.add(EngineRequest(99, ids, SamplingParams(max_tokens=1, seed=0)))
    sizes, times = [], []
    for step in range(120):
        plan = scheduler.plan()
        assert plan is not None
        sizes.append(plan.num_tokens)
        began = executor.clock()
        result = executor.run(plan)
        times.append(executor.clock() - began)
        held += seconds if 60 <= step < 60 + pauses else 0.0
        scheduler.commit(plan, result)
    after = 60 + pauses + 3
    assert max(times[60:]) < (1.5 if pauses >= 5 else 1) * BOUND
    assert min(sizes[after:]) > 0.6 * sizes[59]
    if pauses == 1:
        assert min(sizes[60:]) > 0.7 * sizes[59]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_cut_nothing_else_comes_out(seed: int) -> None:
    """Every plan is checked against the memory; prompts share prefixes, which are cut within."""
    dice = random.Random(seed)
    world = World(num_blocks=160, step_seconds=0.03, max_waiting=1000)
    world.executor._cost = SLOW
    known = [[dice.randrange(100) for _ in range(dice.randrange(2, 90))] for _ in range(4)]
    for _ in range(40):
        prompt = dice.choice(known)[: dice.randrange(1, 90)]
        prompt += [dice.randrange(100) for _ in range(dice.randrange(1, 60))]
        known.append(prompt)
        scored = (
            {"prompt_logprobs_from": dice.randrange(len(prompt))} if dice.random() < 0.3 else {}
        )
        outputs = dice.randrange(6)
        world.submit(prompt, outputs, client=dice.choice("ab"), **scored)  # type: ignore[arg-type]
        for _ in range(dice.randrange(3)):
            world.step()
    world.drain()
    world.expect_cold(*world.jobs.values())
