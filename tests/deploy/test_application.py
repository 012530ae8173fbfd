"""How many engines there should be, and what an application is made of, without a cluster."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rootlace import deploy
from rootlace.deploy import ByQueueAndKV, build
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


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"model": None}, "model"),
        ({"replicas": "many"}, "replicas"),
        ({"replicas": "4-2"}, "replicas: from 4 to 2"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2.0}, "replicas"),
        ({"replicas": (1, 2, 3)}, "replicas"),
        ({"cpus": -1}, "cpus"),
        ({"cpus": math.inf}, "cpus"),
        ({"cpus": "many"}, "cpus"),
        ({"gpus": 1.5}, "gpus"),
        ({"waiting": 0}, "waiting"),
        ({"kv": 1.5}, "kv"),
        ({"surge": -1}, "surge"),
        ({"replicas": "1-2", "autoscaling": {"policy": "theirs"}}, "autoscaling: policy follows"),
        ({"replicas": 2, "autoscaling": {"upscale_delay_s": 3}}, "autoscaling: replicas is 2"),
        ({"max_running": 0}, "max_running"),
        ({"disaggregate": 1}, "disaggregate: not on a Ray cluster: write prefill"),
        ({"prefill": -1}, "prefill"),
        ({"prefill": 1, "disaggregate_by": "memory"}, "disaggregate_by memory: engines of several"),
    ],
)
def test_what_cannot_be_is_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        build({"model": "m", **args})


def test_what_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="model"):
        build({"replicas": 2})
    with pytest.raises(TypeError, match="did you mean 'max_running'"):
        build({"model": "m", "max_runing": "3"})


@pytest.mark.parametrize(
    ("field", "said"), [("bogus", "has no bogus"), ("upscale_delay_s", "upscale_delay_s")]
)
def test_what_serve_refuses_is_named(field: str, said: str) -> None:
    pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
    with pytest.raises(InvalidRequest, match=f"autoscaling: .*{said}"):
        build({"model": "m", "replicas": "1-2", "autoscaling": {field: -3}})


def test_texts_are_read_as_what_an_argument_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve run` gives texts alone; a key or a name may look like a number."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(deploy, "app", lambda **found: given.update(found))
    build({
        "model": "7", "api-key": "0123", "served_name": "true", "cpus": "8", "replicas": "1-4",
        "max_running": "64", "jump_forward": "false", "kernels": "native", "threads": 3,
    })  # fmt: skip
    assert given == {
        "model": "7", "api_key": "0123", "served_name": "true", "cpus": 8, "replicas": (1, 4),
        "max_running": 64, "jump_forward": False, "kernels": "native", "threads": 3,
    }  # fmt: skip
