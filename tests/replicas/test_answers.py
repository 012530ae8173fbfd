"""One answer of several engines."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rootlace.runtime.contracts.messages import PinnedPrefix, TreeNode, TreePage
from rootlace.runtime.contracts.plan import StepCost, mean_cost
from rootlace.runtime.replicas import replicas
from rootlace.runtime.replicas.replicas import NodeIds, all_answers, sum_of
from rootlace.runtime.server.telemetry import Metrics, text_of_all
from rootlace.wire.errors import ServerUnavailable

OWN = {
    "blocks_free": 3,
    "blocks_used": 1,
    "blocks_evictable": 0,
    "blocks_total": 4,
    "prompt_tokens": 10,
    "cached_tokens": 5,
    "waiting": 2,
}


def test_nodes_of_several_trees_have_ids_of_their_own() -> None:
    ids = NodeIds(3)
    nodes = (TreeNode(1, 0, "", "", 0, 4, (1,)), TreeNode(2, 1, "", "", 4, 6, (2,)))
    page = ids.page({at: TreePage(nodes, at != 2, 2, 6) for at in range(3)}, whole=True)
    assert (page.total, page.tokens, page.complete) == (6, 18, False)
    assert len({node.id for node in page.nodes}) == 6
    for node in page.nodes:
        at, own = ids.whose(node.id)
        assert at == node.replica and own in (1, 2)
        assert (ids.whose(node.parent) == (at, 1)) if own == 2 else node.parent == 0
    pins = ids.pins(
        {0: [PinnedPrefix("a", "", "", 4, 1, 9.0)], 2: [PinnedPrefix("a", "", "", 4, 2, 3.0)]}
    )
    assert [(pin.seconds_left, ids.whose(pin.node)) for pin in pins] == [
        (3.0, (2, 2)),
        (9.0, (0, 1)),
    ]


NEVER = object()


class _Client:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def stats(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is NEVER:
            await asyncio.Event().wait()
        return self.answer


def ask(*given: object) -> dict[int, Any]:
    clients: Any = {at: _Client(answer) for at, answer in enumerate(given)}
    return asyncio.run(all_answers(clients, lambda client: client.stats()))


def test_who_does_not_answer_is_missing() -> None:
    down = ServerUnavailable("down")
    assert ask({"a": 1}, down, {"a": 2}) == {0: {"a": 1}, 2: {"a": 2}}
    with pytest.raises(ServerUnavailable):
        ask(down, down)
    with pytest.raises(ZeroDivisionError):
        ask({}, ZeroDivisionError())


def test_who_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PATIENCE_SECONDS", 0.01)
    assert ask(NEVER, {"a": 2}, ServerUnavailable("down")) == {1: {"a": 2}}


def test_sums_and_means() -> None:
    assert sum_of({0: {"a": 1, "b": 0.5}, 2: {"a": 2, "b": 1.0}}) == {"a": 3, "b": 1.5}
    mean = mean_cost([StepCost(1.0, 2.0, max_step_tokens=7), StepCost(3.0, 4.0, pair=1.0)])
    assert mean == StepCost(2.0, 3.0, pair=0.5, max_step_tokens=7)


@pytest.mark.parametrize("several_models", [False, True])
def test_each_engine_has_its_own_metrics(several_models: bool) -> None:
    status = {
        **{name: 2 * value for name, value in OWN.items()},
        "requests_moved": 7,
        "sessions": 1,
        "replicas": [{"replica": 0, "up": True, **OWN}, {"replica": 1, "up": False}],
    }
    if several_models:
        text = text_of_all(Metrics(), {"m": (Metrics(), status)}).decode()
    else:
        text = Metrics().text(status).decode()
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels}
            if several_models:
                assert labels.pop("model") == "m"
            found[sample.name][labels.get("replica", "")] = sample.value
    assert found["rootlace_up"] == {"0": 1.0, "1": 0.0}
    assert found["rootlace_waiting"] == {"0": 2.0}, "no sum beside the parts"
    assert found["rootlace_cache_hit_ratio"] == {"0": 0.5}
    assert found["rootlace_requests_moved_total"] == {"": 7.0}
    assert found["rootlace_sessions"] == {"": 1.0}
    assert "rootlace_replica" not in found and "rootlace_replica_total" not in found
