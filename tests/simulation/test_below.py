"""Cache levels below a simulated pool."""

import random

import pytest

from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.cluster import Cluster, ClusterReport
from rootlace.runtime.simulation.engine import Below, Machine, parse_policy
from rootlace.runtime.simulation.study import Outcome
from rootlace.runtime.simulation.study import replay as play
from rootlace.runtime.simulation.trace import Load, Trace, Workload
from tests.simulation.traces import token_trace

COST = StepCost(step=0.0, prefill=0.1, decode=0.0, max_step_tokens=64)
LPM = parse_policy("lpm")
DISK = Below("disk", 1024, 0.01)


def turns(seed: int = 0, count: int = 40) -> Trace:
    """Make prompts of 65 tokens; the first 48 are one of four prefixes."""
    dice = random.Random(seed)
    prompts = [
        [1000 + dice.randrange(4), *range(47), *(dice.randrange(1 << 20) for _ in range(17))]
        for _ in range(count)
    ]
    return token_trace(prompts, outputs=1, gap=20.0)


def replay(trace: Trace, tokens: int, *below: Below) -> Outcome:
    workload = Workload(trace, Load(granularity=1))
    return play(workload, LPM, Machine(tokens, COST, 256, below))


def spread(trace: Trace, tokens: int, *below: Below, router: str = "exact") -> ClusterReport:
    workload = Workload(trace, Load(granularity=1))
    policy = parse_policy("fcfs")
    return Cluster(workload, policy, Machine(tokens, COST, 256, below), 2, router).run()


def test_what_was_evicted_is_read_back_in_the_time_that_this_takes() -> None:
    first, other = [7, *range(1, 65)], [8, *range(65, 129)]
    trace = token_trace([first, other, first], outputs=1, gap=100.0)
    assert replay(trace, 96).cached.tolist() == [0, 0, 16]  # a block of the first prefix is left
    found = replay(trace, 96, DISK)
    assert found.cached.tolist() == [0, 0, 64] and found.restored_tokens == 48
    # 48 tokens are read, one is computed.
    assert found.first == pytest.approx([6.5, 6.5, 0.48 + 0.1], abs=1e-4)


def test_a_level_that_is_slower_than_computing_is_not_used() -> None:
    slow = replay(turns(), 96, Below("disk", 1024, 0.2))
    assert slow.restored_tokens == 0 and slow.first == pytest.approx(replay(turns(), 96).first)


def test_what_a_level_drops_goes_to_the_next() -> None:
    host, found = Below("host", 96, 0.001), []
    for below in ((), (host,), (host, DISK)):
        found.append(int(replay(turns(), 96, *below).cached.sum()))
    assert found[0] < found[1] < found[2]
    endless = replay(turns(), 1 << 16)
    assert found[2] == int(endless.cached.sum())


@pytest.mark.parametrize("router", ["exact", "power-of-two"])
def test_everybody_is_served_where_all_wait_for_a_disk(router: str) -> None:
    trace = turns(1)
    trace.arrivals[:] /= 50  # several at once
    report = spread(trace, 112, DISK, router=router)
    assert report.requests - report.refused == 40 and report.read_back > 0


def test_the_router_sends_a_prompt_to_the_disk_that_has_it() -> None:
    """Its replica computed more than the other by then, and lost the prefix from its pool."""
    first, others = [7, *range(1, 65)], [[9 + n, *range(200, 264)] for n in range(4)]
    trace = token_trace([first, *others, first], outputs=1, gap=100.0)
    assert spread(trace, 96).hit_rate == 0
    report = spread(trace, 96, DISK)
    assert report.read_back == report.hit_rate == pytest.approx(64 / (6 * 65))
