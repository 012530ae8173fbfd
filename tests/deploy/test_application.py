"""How many engines there should be, and what an application is made of, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rootlace.deploy import build
from rootlace.deploy.autoscaling import ByQueueAndKV
from rootlace.wire.errors import InvalidRequest


@pytest.mark.parametrize(
    ("current", "waiting", "kv", "wanted"),
    [
        (2, [4, 4], [0.1, 0.1], 2),  # at the bound
        (2, [6, 6], [0.1, 0.1], 3),  # half as much again
        (2, [0, 9], [0.1, 0.1], 3),  # 4.5 on average
        (2, [100, 100], [0.1, 0.1], 4),  # never more than twice as many
        (3, [0, 0, 0], [0.9, 0.9, 0.9], 4),  # the pools are full
        (4, [1, 1, 1, 1], [0.2, 0.2, 0.2, 0.2], 3),
        (4, [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5], 4),
        (1, [0], [0], 1),
        (2, [0, 0], [0, 0], 1),
        (2, [], [], 2),  # nothing is known yet
    ],
)
def test_engines_follow_queues_and_pools(
    current: int, waiting: list[float], kv: list[float], wanted: int
) -> None:
    metrics = {name: dict(enumerate(each)) for name, each in (("waiting", waiting), ("kv", kv))}
    context = SimpleNamespace(target_num_replicas=current, aggregated_metrics=metrics)
    assert ByQueueAndKV(waiting=4, kv=0.8)(context) == (wanted, {})


def test_it_comes_to_rest() -> None:
    """A load that is as it is asks for the same number again and again, from either side."""
    policy = ByQueueAndKV(waiting=4, kv=0.8)
    for load in range(0, 200, 7):
        for engines in (1, 3, 20):
            seen = [engines]
            while len(seen) < 60:
                each = dict.fromkeys(range(seen[-1]), load / seen[-1])
                seen.append(policy.wanted(seen[-1], each, dict.fromkeys(each, 0.0)))
            assert seen[-1] == seen[-2]
            assert load / seen[-1] <= 4


def test_what_cannot_be_is_refused() -> None:
    pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
    for args, said in (
        ({"replicas": 2}, "model"),
        ({"model": "m", "replicas": "many"}, "replicas"),
        ({"model": "m", "replicas": "4-2"}, "replicas"),
        ({"model": "m", "replicas": 0}, "replicas"),
        ({"model": "m", "max_running": 0}, "max_running"),
        ({"model": "m", "disaggregate": 1}, "disaggregate: not on a Ray cluster"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            build(args)
    with pytest.raises(TypeError, match="did you mean 'max_running'"):
        build({"model": "m", "max_runing": "3"})
