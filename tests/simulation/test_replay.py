"""Replays, against times worked out by hand."""

import random
from pathlib import Path

import numpy as np
import pytest

from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.engine import Machine, parse_policy
from rootlace.runtime.simulation.study import Outcome, count_overtaken
from rootlace.runtime.simulation.study import replay as play
from rootlace.runtime.simulation.trace import Load, Workload, read_trace
from tests.simulation.traces import token_trace, write_azure, write_mooncake

EPS = 1e-4  # the simulated clock moves when it is read


def _replay(
    workload: Workload, policy: str, tokens: int, cost: StepCost, max_running: int = 256
) -> Outcome:
    return play(workload, parse_policy(policy), Machine(tokens, cost, max_running))


def test_first_come_first_served_by_hand(tmp_path: Path) -> None:
    """Steps take 1 s, a prompt's token 0.1 s, a decode row 0.01 s; four tokens to a step."""
    path = write_azure(tmp_path / "t.csv", [(0, 6, 3), (0, 3, 1), (2, 2, 2)])
    workload = Workload(read_trace(path), Load(granularity=1))
    cost = StepCost(step=1.0, prefill=0.1, decode=0.01, max_step_tokens=4)
    outcome = _replay(workload, "fcfs", 1600, cost)
    # 0.0  A: 4 of 6                       until 1.4
    # 1.4  A: 2 (first token), B: 2 of 3   until 2.8; C came at 2
    # 2.8  A decodes, B: 1 (ends), C: 2    until 4.11
    # 4.11 A decodes (ends), C decodes     until 5.13
    assert outcome.waited == pytest.approx([0, 1.4, 0.8], abs=EPS)
    assert outcome.first == pytest.approx([2.8, 4.11, 2.11], abs=EPS)
    assert outcome.last == pytest.approx([5.13, 4.11, 3.13], abs=EPS)
    assert outcome.decoding == pytest.approx([2.33, 0, 1.02], abs=EPS)
    assert outcome.seconds == pytest.approx(5.13, abs=EPS)
    assert outcome.busy_seconds == pytest.approx(5.13, abs=EPS)
    assert outcome.steps == 4
    assert outcome.cached.tolist() == [0, 0, 0] and outcome.overtaken.tolist() == [0, 0, 0]
    assert outcome.admitted.tolist() == [0, 1, 2]


def test_context_and_pairs_by_hand(tmp_path: Path) -> None:
    path = write_azure(tmp_path / "t.csv", [(0, 10, 3)])
    workload = Workload(read_trace(path), Load(granularity=1))
    cost = StepCost(step=1.0, prefill=0.0, context=0.001, pair=0.01, max_step_tokens=6)
    outcome = _replay(workload, "fcfs", 1600, cost)
    # Six tokens attend to three each on average, four to eight; then 11 and 12 tokens are read.
    assert outcome.first[0] == pytest.approx(1 + 0.18 + 1 + 0.32, abs=EPS)
    assert outcome.decoding[0] == pytest.approx(1 + 0.011 + 1 + 0.012, abs=EPS)


def test_lpm_goes_where_the_prefix_is_and_dfs_groups(tmp_path: Path) -> None:
    """X is cached; Y precedes another X in the queue, and one request runs at a time."""
    x, y = [1] * 20, [2] * 20
    prompts = [[*x, 3], [*y, 4], [*x, 5], [*y, 6], [*x, 7]]
    workload = Workload(token_trace(prompts), Load(granularity=1))
    cost = StepCost(step=1.0, prefill=0.0, max_step_tokens=64)
    for policy, order in (
        ("fcfs", [0, 1, 2, 3, 4]),
        ("lpm", [0, 2, 4, 1, 3]),
        ("lpm-no-aging", [0, 2, 4, 1, 3]),
        ("lpm:1", [0, 2, 1, 3, 4]),
        ("lpm:1:10", [0, 2, 4, 1, 3]),
        ("dfs", [0, 2, 4, 1, 3]),
    ):
        outcome = _replay(workload, policy, 16 * 40, cost, max_running=1)
        assert outcome.admitted.tolist() == order, policy
        place = [order.index(n) for n in range(5)]
        overtaken = [sum(place[m] < place[n] for m in range(n + 1, 5)) for n in range(5)]
        assert outcome.overtaken.tolist() == overtaken
        assert outcome.cached.tolist() == [0, 0, 20, 20, 20]


def _mixed(seed: int, granularity: int, tmp_path: Path) -> Workload:
    dice = random.Random(seed)
    rows = []
    stems = [[*range(100 * k, 100 * k + 6)] for k in range(4)]
    for n in range(80):
        blocks = [*dice.choice(stems)[: dice.randint(0, 6)], 10_000 + n]
        length = 512 * len(blocks) - dice.randrange(512)
        rows.append((n / 4, length, dice.randint(1, 90), blocks))
    trace = read_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    return Workload(trace, Load(granularity=granularity))


COST = StepCost(step=0.01, prefill=1e-4, decode=1e-4, context=1e-7, pair=1e-8, max_step_tokens=512)


@pytest.mark.parametrize("policy", ["lpm", "dfs"])
def test_the_same_again(policy: str, tmp_path: Path) -> None:
    one, two = (_replay(_mixed(1, 16, tmp_path), policy, 40_000, COST) for _ in range(2))
    for name in Outcome.__struct_fields__:
        a, b = getattr(one, name), getattr(two, name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, name


def test_granularity_changes_little(tmp_path: Path) -> None:
    exact, coarse = (
        _replay(_mixed(2, granularity, tmp_path), "lpm", 40_000, COST, max_running=16)
        for granularity in (1, 16)
    )
    hits = [
        outcome.cached.sum() / _mixed(2, granularity, tmp_path).prompt_units.sum()
        for outcome, granularity in ((exact, 1), (coarse, 16))
    ]
    assert hits[1] == pytest.approx(hits[0], rel=0.05)
    assert coarse.seconds == pytest.approx(exact.seconds, rel=0.05)
    # A request that arrives within a simulated step waits for its end: 16 engine steps at most.
    delay = coarse.first.mean() - exact.first.mean()
    assert 0 < delay < 16 * (COST.step + 16 * (COST.decode + 4000 * COST.context))
    assert coarse.steps == pytest.approx(exact.steps, rel=0.1)
    several = exact.decoding > 0
    pace = coarse.decoding[several].sum() / exact.decoding[several].sum()
    assert pace == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("granularity", [1, 8])
def test_one_request_takes_what_it_takes(granularity: int, tmp_path: Path) -> None:
    """A request alone takes the same time at any granularity."""
    path = write_azure(tmp_path / "t.csv", [(0, 4000, 101)])
    workload = Workload(read_trace(path), Load(granularity=granularity))
    cost = StepCost(step=0.01, prefill=1e-4, decode=1e-3, max_step_tokens=512)
    outcome = _replay(workload, "lpm", 10_000, cost)
    assert outcome.first[0] == pytest.approx(8 * 0.01 + 0.4, abs=EPS)
    assert outcome.decoding[0] == pytest.approx(100 * 0.011, abs=EPS)
    assert outcome.steps == 108


def test_memory_too_small(tmp_path: Path) -> None:
    """A request that does not fit is refused; the others take turns, some of them twice."""
    path = write_azure(tmp_path / "t.csv", [(0, 100, 200)] * 6 + [(0, 1000, 1)])
    workload = Workload(read_trace(path), Load(granularity=4))
    outcome = _replay(workload, "fcfs", 640, COST)
    assert outcome.retractions and outcome.evicted_tokens
    assert outcome.admitted.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.isnan([outcome.waited[6], outcome.first[6], outcome.last[6]]).all()
    assert outcome.cached[6] == outcome.overtaken[6] == -1
    assert (outcome.last[:6] >= outcome.first[:6]).all()
    assert (outcome.first[:6] > outcome.waited[:6]).all()


def test_an_output_too_long_is_refused(tmp_path: Path) -> None:
    """The output would end where the cache ends. The last token needs no slot."""
    path = write_azure(tmp_path / "t.csv", [(0, 100, 541), (0, 100, 542), (0, 9, 2**31 - 1)])
    workload = Workload(read_trace(path), Load(granularity=1))
    outcome = _replay(workload, "lpm", 640, COST)
    assert outcome.admitted.tolist() == [0]
    assert outcome.steps == 541 and np.isfinite(outcome.last[0])


def test_the_clock_waits_for_arrivals(tmp_path: Path) -> None:
    path = write_azure(tmp_path / "t.csv", [(0, 8, 1), (500, 8, 1)])
    workload = Workload(read_trace(path), Load(granularity=1))
    outcome = _replay(workload, "lpm", 1600, StepCost(step=1.0, prefill=0.0))
    assert outcome.first == pytest.approx([1, 1], abs=EPS)
    assert outcome.seconds == pytest.approx(501, abs=EPS)
    assert outcome.busy_seconds == pytest.approx(2, abs=EPS)


def test_progress_is_told(tmp_path: Path) -> None:
    path = write_azure(tmp_path / "t.csv", [(0, 8, 1), (0, 99_999, 1), (5, 8, 2)])
    workload = Workload(read_trace(path), Load(granularity=1))
    told: list[int] = []
    play(workload, parse_policy("lpm"), Machine(1600, COST), told.append)
    assert told == sorted(told) and told[-1] == 3


def test_overtaking_is_counted() -> None:
    dice = np.random.default_rng(0)
    for count in (1, 2, 30):
        for _ in range(20):
            admitted = dice.permutation(count)[: dice.integers(1, count + 1)]
            order = admitted.tolist()
            expected = [
                sum(m > n for m in order[: order.index(n)]) if n in order else -1
                for n in range(count)
            ]
            assert count_overtaken(admitted, count).tolist() == expected
