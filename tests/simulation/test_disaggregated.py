"""Simulated replicas that compute prompts alone, beside others that decode."""

import numpy as np
import pytest
from msgspec.structs import replace

from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.cluster import Apart, Cluster, ClusterReport, Link, lacks, receive
from rootlace.runtime.simulation.engine import Machine, SimulatedEngine, Times, parse_policy
from rootlace.runtime.simulation.trace import Load, Trace, Workload
from tests.simulation.traces import token_trace

COST = StepCost(step=0.01, prefill=1e-3, max_step_tokens=256)
LINK = Link(bytes_per_second=1000.0, latency=0.002, token_bytes=1)
POLICY = parse_policy("lpm")


def play(trace: Trace, apart: Apart | None, replicas: int = 2, cache: int = 4096) -> ClusterReport:
    workload = Workload(trace, Load(granularity=1))
    return Cluster(workload, POLICY, Machine(cache, COST), replicas, "exact", apart).run()


def test_the_times_of_a_request_are_those_of_its_parts() -> None:
    report = play(token_trace([range(64)], outputs=5), Apart(1, 1, LINK))
    # All of the prompt is computed, three blocks travel, and the fourth is computed again.
    first = (0.01 + 64e-3) + (48 / 1000 + 0.002) + (0.01 + 16e-3)
    assert report.ttft == pytest.approx((first,) * 3, abs=1e-5)
    assert report.tpot == pytest.approx((0.01,) * 3, abs=1e-5)
    assert (report.handed, report.prefill_replicas, report.replicas) == (1, 1, 2)
    assert report.moved == 48 / 64 and report.hit_rate == -16 / 64  # the blocks were computed twice


def test_prompts_travel_one_after_the_other_and_rows_go_on_meanwhile() -> None:
    slow = replace(LINK, bytes_per_second=48.0)  # three blocks take a second
    prompts = [range(100 * n, 100 * n + 64) for n in range(3)]
    report = play(token_trace(prompts, outputs=2), Apart(1, 1, slow))
    assert report.ttft[2] > 3 and report.ttft[0] < 2.3
    assert report.tpot[2] < 0.1


def test_only_what_the_decoder_lacks_travels_and_short_prompts_do_not() -> None:
    prompts = [range(64), [*range(48), *range(500, 580)], [*range(48), *range(900, 920)]]
    trace = token_trace(prompts, outputs=2, gap=5.0)
    report = play(trace, Apart(1, 40, LINK))
    # 48 of the first, (128 - 1) // 16 * 16 - 48 of the second; the third lacks 16.
    assert report.handed == 2 and report.moved == pytest.approx((48 + 64) / (64 + 128 + 68))
    both = play(trace, None)
    assert both.handed == both.moved == both.prefill_replicas == 0


def engine_of(trace: Trace, cache: int) -> tuple[SimulatedEngine, Workload]:
    workload = Workload(trace, Load(granularity=1))
    times = Times(len(workload))
    return SimulatedEngine(workload, POLICY, Machine(cache, COST), times), workload


def test_what_is_received_is_cached_to_the_token() -> None:
    engine, workload = engine_of(token_trace([range(64), [*range(20), *range(500, 560)]]), 256)
    assert lacks(engine, workload, 0) == 48
    receive(engine, workload, 0, 48)
    assert lacks(engine, workload, 0) == 0
    # Four tokens of the second block are equal; the whole block is transferred all the same.
    assert lacks(engine, workload, 1) == 48
    receive(engine, workload, 1, 48)
    assert lacks(engine, workload, 1) == 0
    engine.scheduler.check()


def test_blocks_that_continue_nothing_are_dropped_and_room_is_made_for_others() -> None:
    engine, workload = engine_of(token_trace([range(64), range(100, 164)]), 64)
    receive(engine, workload, 0, 32)  # the first one was evicted meanwhile
    assert lacks(engine, workload, 0) == 48
    receive(engine, workload, 0, 48)
    receive(engine, workload, 1, 48)
    assert lacks(engine, workload, 1) == 0 and lacks(engine, workload, 0) > 0
    engine.scheduler.check()


@pytest.mark.parametrize("prefill", [1, 2])
def test_everybody_is_served(prefill: int) -> None:
    dice = np.random.default_rng(prefill)
    prompts = [dice.integers(0, 4, size=int(dice.integers(20, 90))).tolist() for _ in range(60)]
    trace = token_trace(prompts, outputs=6, gap=0.02)
    apart, both = (play(trace, given, 3, 256) for given in (Apart(prefill, 40, LINK), None))
    assert apart.refused == both.refused == 0 and 0 < apart.handed < 60
    assert 0 < apart.prefill_busy < 1 and 0 < apart.decode_busy < 1
    assert np.isfinite([*apart.ttft, *apart.tpot]).all() and min(apart.ttft) > 0
