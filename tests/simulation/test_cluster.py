"""Several simulated engines behind a router."""

import itertools
import random

import numpy as np
import pytest

from benchmarks.routing import ROUTINGS, RayPrefix
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.cluster import Cluster, ClusterReport
from rootlace.runtime.simulation.engine import Machine, parse_policy
from rootlace.runtime.simulation.study import replay, report_on
from rootlace.runtime.simulation.trace import Load, Trace, Workload
from tests.simulation.traces import token_trace

COST = StepCost(step=0.01, prefill=1e-3, decode=1e-3, context=1e-6, max_step_tokens=64)


def shared(count: int, seed: int, gap: float) -> Trace:
    """Make prompts behind one of eight prefixes of 48 tokens."""
    dice = random.Random(seed)
    prompts = [
        [1000 + dice.randrange(8), *range(47), *(dice.randrange(1 << 20) for _ in range(4))]
        for _ in range(count)
    ]
    return token_trace(prompts, outputs=4, gap=gap)


def play(workload: Workload, router: str, replicas: int, tokens: int = 4096) -> ClusterReport:
    return Cluster(workload, parse_policy("lpm"), Machine(tokens, COST), replicas, router).run()


@pytest.mark.parametrize("router", sorted(ROUTINGS))
def test_one_replica_is_what_an_engine_alone_is(router: str) -> None:
    workload = Workload(shared(30, 1, 0.02), Load(granularity=1))
    machine = Machine(1024, COST)
    alone = report_on(workload, replay(workload, parse_policy("lpm"), machine), 1.0)
    report = play(workload, router, 1, tokens=1024)
    assert report.hit_rate == pytest.approx(alone.hit_rate)
    assert report.ttft == pytest.approx(alone.ttft, rel=1e-3)
    assert report.tpot == pytest.approx(alone.tpot, rel=1e-3)
    assert report.refused == alone.refused == 0 and report.imbalance == 1.0


def test_who_knows_the_caches_computes_least_and_answers_soonest() -> None:
    # Four caches of 144 tokens have room for two of the eight prefixes each, beside what runs.
    workload = Workload(shared(150, 2, 0.012), Load(granularity=1))
    names = ("exact", "power-of-two", "turns", "sessions")
    reports = {name: play(workload, name, 4, tokens=144) for name in names}
    best = reports["exact"]
    assert all(report.requests - report.refused == 150 for report in reports.values())
    for name in ("power-of-two", "turns"):
        assert best.hit_rate > reports[name].hit_rate + 0.1
        assert best.ttft[2] < reports[name].ttft[2]
    assert reports["sessions"].hit_rate > reports["turns"].hit_rate


def test_our_router_goes_by_what_caches_hold_and_not_only_by_what_is_on_its_way() -> None:
    trace = shared(60, 3, 1.0)  # each request ends before the next arrives
    report = play(Workload(trace, Load(granularity=1)), "exact", 4)
    seen: set[int] = set()
    found = 0
    for at in range(60):
        blocks = trace.blocks[trace.starts[at] : trace.starts[at + 1]]
        found += sum(1 for block in blocks[:48].tolist() if block in seen)
        seen.update(blocks.tolist())
    assert report.hit_rate == pytest.approx(found / int(trace.prompt_tokens.sum()))


def test_the_clock_is_read_only_where_a_router_works() -> None:
    workload = Workload(token_trace([[1, 2, 3], [4, 5]], outputs=50, gap=10.0), Load(granularity=1))
    reads = itertools.count()
    Cluster(
        workload,
        parse_policy("lpm"),
        Machine(1024, COST),
        replicas=2,
        router="power-of-two",
        cpu=lambda: float(next(reads)),
    ).run()
    assert next(reads) == 2 * 3 * 2  # around the choice, the first token and the end of both


def test_rays_router_counts_the_text_that_a_replica_was_sent_anew() -> None:
    starts = ([0, 1], [0], [0, 1], [0, 1])
    prompts = [[*start, *range(100 * n, 100 * n + 40)][:40] for n, start in enumerate(starts, 1)]
    workload = Workload(token_trace(prompts), Load(granularity=1))
    router = RayPrefix(workload, Machine(1024, COST), [None, None])  # type: ignore[list-item]
    assert [router.route(number, 0.0) for number in range(4)] == [0, 1, 0, 1]
    # The last prompt shares two tokens with the other replica's, one with its own's.
    assert router._sizes == pytest.approx([40 + 38, 40 + 39])


def test_what_does_not_fit_is_refused() -> None:
    trace = token_trace([list(range(40)), [1, 2, 3]], outputs=2, gap=1.0)
    report = play(Workload(trace, Load(granularity=1)), "exact", 2, tokens=32)
    assert report.refused == 1 and report.requests == 2
    row = report.to_json()
    assert row["router"] == "exact" and row["ttft"].keys() == {"p50", "p90", "p99"}
    assert np.isfinite(list(row["ttft"].values())).all()
