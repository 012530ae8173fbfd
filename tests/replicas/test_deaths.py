"""What an engine left when it died, and who is told to go on with it."""

from typing import Any

import numpy as np
import pytest

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest, Ready, Unpin
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.runtime.engine.client.restarts import PendingRequest, RestartPolicy
from rootlace.runtime.replicas.dispatch import Dispatch
from rootlace.runtime.replicas.replicas import Replicas
from rootlace.wire.protocol import SamplingParams


class _Down:
    """An engine's client while there is no engine."""

    def __init__(self) -> None:
        self.restarts = RestartPolicy()

    def adopt(self, pending: PendingRequest) -> None:
        assert self.restarts.adopt(pending, up=False) is None


def test_who_finds_no_other_engine_has_died_once() -> None:
    """The other one is being started again; the request was alone in the step."""
    heard = list[EngineOutput]()
    clients, replicas = [_Down(), _Down()], Replicas(2, None)
    dispatch = Dispatch(2, Ready(0, 64, 16, 512, 1024, 300, "cpu", "float32"), lambda at: None)
    whole: Any = replicas
    whole._clients, whole._dispatch = clients, dispatch
    dispatch.down(1)
    request = EngineRequest(1, np.array([5, 6], np.int32), SamplingParams(max_tokens=9))
    own = clients[dispatch.place(request)].restarts
    own.add(request, heard.append, sent=True)
    for suspected in ([3], []):  # with the second death it is given up
        own.died({1: 3})
        whole._died(0, own.leave())
        assert [one.suspected for one in own.resume()] == suspected
    assert [update.finish for update in heard] == ["error"]


class _Up:
    """The client of an engine that has no pin."""

    healthy = True

    async def ask(self, kind: Any, *fields: Any) -> bool:
        return False


@pytest.mark.parametrize("meeting", [None, object()])
async def test_what_is_let_go_of_while_its_engine_is_down_is_not_pinned_again(
    meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where engines come and go, and only those that are there are asked."""
    patience = "rootlace.runtime.replicas.replicas.PATIENCE_SECONDS"
    monkeypatch.setattr(patience, 0.1)  # no answer can come
    down: Any = EngineClient(EngineConfig())
    request = EngineRequest(
        1, np.array([5, 6], np.int32), SamplingParams(max_tokens=9), namespace="n"
    )
    down._pinned.note("p", request)
    whole: Any = Replicas(2, None, meeting=meeting)
    whole._clients = [down, _Up()]
    assert await whole.ask(Unpin, "p", "other") is False
    assert await whole.ask(Unpin, "p", "n") is True
    assert not list(down._pinned.again(down.next_rid))
    assert await whole.ask(Unpin, "p", "n") is False
