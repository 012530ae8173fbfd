"""The clients of the soak, for a moment: all requests are answered, and nothing stays behind."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rootlace as rl
from benchmarks.soak.__main__ import drifts
from benchmarks.soak.load import KINDS, Tally, running
from benchmarks.soak.record import LOADS, Record, Sample
from benchmarks.soak.slope import Slope, slope_of
from tests.e2e.conftest import RawClient, Server
from tests.waiting import eventually, until

SAME = dict.fromkeys(LOADS, 5.0) | {"cached_tokens": 0.0, "computed_tokens": 0.0}
"""Counters of an engine with always as much under way."""


async def test_everything_the_clients_ask_is_answered(server: Server, client: RawClient) -> None:
    """This server's engine checks its tree and pool after every step."""
    engine = server.engine().pid
    async with running(server.url, rl.RuntimeEndpoint(server.address), 24, 1, 0.02, 3) as tally:
        await until(lambda: tally.failed or len(tally.done) == len(KINDS) + 1)
    assert tally.told == []
    assert tally.repeated
    eventually(lambda: {client.status()[name] for name in ("running", "waiting")} == {0})
    assert server.engine().pid == engine


def test_a_server_that_forgets_is_found_out() -> None:
    tally = Tally()
    tally.same("question", "answer")
    with pytest.raises(Exception, match="before 'answer'"):
        tally.same("question", "other")


def test_a_slope_and_its_error() -> None:
    """Against numpy's least squares, whose residuals give the error."""
    dice = np.random.default_rng(0)
    times = np.arange(0, 3600, 60.0)
    values = 100 + times / 3600 * 7 + dice.normal(size=len(times))
    found = slope_of([(times, values)])
    (slope, _), covariance = np.polyfit(times / 3600, values, 1, cov=True)
    assert found is not None
    assert found.per_hour == pytest.approx(slope)
    assert found.error == pytest.approx(math.sqrt(covariance[0, 0]))
    assert found.mean == pytest.approx(values.mean())
    assert found.points == len(times)


def test_lives_have_levels_of_their_own() -> None:
    """Two engines with constant memory: a higher level of the second is no growth."""
    flat = [([0.0, 60.0, 120.0], [5.0, 5.0, 5.0]), ([300.0, 360.0, 420.0], [9.0, 9.0, 9.0])]
    found = slope_of(flat)
    assert found is not None and found.per_hour == pytest.approx(0) and found.mean == 7
    assert slope_of([([0.0], [1.0])]) is None and slope_of([]) is None


def test_what_is_measured_of_a_process_begins_when_it_has_settled() -> None:
    def sample(second: float, engine: int) -> Sample:
        memory = 50.0 if second < 300 else 60 + second / 3600
        values = dict.fromkeys(("gateway_rss_mib", "engine_rss_mib"), memory)
        return Sample(second, engine, values, SAME)

    record = Record([sample(second, 1) for second in np.arange(0, 1800, 5.0)])
    slope = record.slopes(600)["engine_rss_mib"]
    assert slope is not None and slope.per_hour == pytest.approx(1)
    with_start = record.slopes(0)["gateway_rss_mib"]
    assert with_start is not None and with_start.per_hour > 10


def test_an_engine_whose_objects_are_counted_says_how_these_grew_and_nothing_else() -> None:
    def sample(second: float) -> Sample:
        """Make a sample: the second engine is constant; the first one's count of objects grows."""
        if second >= 1200:
            return Sample(second, 2, {"engine_rss_mib": 60.0}, SAME)
        grown = second / 3600
        values = {"engine_rss_mib": 80 + grown, "engine_traced_mib": 20 + grown}
        return Sample(second, 1, values, SAME)

    slopes = Record([sample(second) for second in np.arange(0, 2400, 5.0)]).slopes(60)
    resident, objects = slopes["engine_rss_mib"], slopes["engine_traced_mib"]
    assert resident is not None and (resident.per_hour, resident.mean) == (0, 60)
    assert objects is not None and objects.per_hour == pytest.approx(1)


def test_the_gateway_has_settled_after_the_last_engine() -> None:
    """Without an engine, waiting requests take memory, some of which stays."""

    def sample(second: float) -> Sample:
        waited = 0.0 if second < 1200 else 20.0
        values = {"gateway_rss_mib": 200 + waited + second / 3600, "engine_rss_mib": 60.0}
        return Sample(second, 1 + (second >= 1200), values, SAME)

    slope = Record([sample(second) for second in np.arange(0, 2400, 5.0)]).slopes(60)
    found = slope["gateway_rss_mib"]
    assert found is not None and found.per_hour == pytest.approx(1) and found.points == 19


def test_memory_is_compared_at_equal_load() -> None:
    """Ever more requests wait and take memory; apart from those, an hour takes 3 MiB."""
    dice = np.random.default_rng(0)

    def sample(second: float) -> Sample:
        load = SAME | {"waiting": second / 60 + 40 * dice.random(), "running": 9 * dice.random()}
        memory = 60 + second / 1200 + 0.1 * load["waiting"] + 0.2 * load["running"]
        return Sample(second, 1, {"engine_rss_mib": memory}, load)

    record = Record([sample(second) for second in np.arange(0, 3600, 60.0)])
    found = record.slopes(0)["engine_rss_mib"]
    assert found is not None and found.per_hour == pytest.approx(3) and found.error < 1e-6


def test_what_surely_grows_is_a_fault() -> None:
    def named(name: str, per_hour: float, error: float) -> bool:
        return bool(drifts({name: Slope(per_hour, error, 100.0, 50)}))

    assert named("engine_rss_mib", 5.0, 0.5) and named("hit_rate", -5.0, 0.5)
    assert not named("engine_rss_mib", 5.0, 2.0) and not named("engine_rss_mib", 1.9, 0.0)
    assert not named("engine_rss_mib", -5.0, 0.5) and not named("hit_rate", 5.0, 0.5)
    assert drifts({"hit_rate": None})
    # It is part of resident memory, which has its own check.
    assert not named("engine_kept_mib", 5.0, 0.5) and named("engine_held_mib", 5.0, 0.5)
