"""What an engine left when it died, and who is told to go on with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rootlace.runtime.contracts.messages import Ready
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.client.in_flight import InFlight, Submitted
from rootlace.runtime.replicas import Replicas
from rootlace.runtime.replicas.dispatch import Dispatch
from rootlace.wire.protocol import SamplingParams


class _Down:
    """An engine's client while there is no engine."""

    def __init__(self) -> None:
        self.in_flight = InFlight()

    def adopt(self, submitted: Submitted, in_step: Mapping[int, int]) -> None:
        assert self.in_flight.adopt(submitted, in_step, sent=False) is None


def test_who_finds_no_other_engine_has_died_once() -> None:
    """The other one is being started again; the request was alone in the step."""
    heard = list[Update]()
    clients, replicas = [_Down(), _Down()], Replicas(2, None)
    dispatch = Dispatch(2, Ready(0, 64, 16, 512, 1024, 300, "cpu", "float32"), lambda at: None)
    whole: Any = replicas
    whole._clients, whole._dispatch = clients, dispatch
    dispatch.down(1)
    request = Request(1, np.array([5, 6], np.int32), SamplingParams(max_tokens=9))
    own = clients[dispatch.place(request)].in_flight
    own.add(request, heard.append, sent=True)
    in_step = {1: 3}
    for suspected in (1, None):  # with the second death it is given up
        own.judge(in_step)
        whole._died(0, own.leave(in_step), in_step)
        resumed = list(own.resume(in_step))
        assert [one.suspected for one in resumed] == ([] if suspected is None else [suspected])
    assert [update.finish for update in heard] == ["error"]
