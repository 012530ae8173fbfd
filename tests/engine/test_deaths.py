"""Deaths of engines: which of them count, and who is to be kept from causing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    EngineOutput,
    EngineRequest,
    FromEngine,
    Ready,
    ToEngine,
)
from rootlace.runtime.engine.client import EngineClient
from rootlace.runtime.engine.client.cache_orders import Forgets
from rootlace.runtime.engine.client.restarts import (
    MAX_CULPRITS,
    MAX_RESTARTS,
    RESTART_WINDOW_SECONDS,
    WINDOW_SECONDS,
    Culprits,
    Deaths,
    InFlight,
    Submitted,
)
from rootlace.runtime.engine.client.siblings import ReplicaContext
from rootlace.wire.errors import InvalidRequest, ServerUnavailable
from rootlace.wire.protocol import SamplingParams
from tests.waiting import until


def request(rid: int, client: str) -> EngineRequest:
    return EngineRequest(rid, np.array([1], np.int32), SamplingParams(max_tokens=1), client=client)


def test_who_is_found_explains_the_deaths_of_all_engines_that_had_it() -> None:
    """Each of these is found at the second engine; it was the first one's death, too."""
    heard, culprits = list[EngineOutput](), Culprits()
    (first, second), (one, two) = (InFlight(culprits), InFlight(culprits)), (Deaths(), Deaths())
    for rid in range(MAX_RESTARTS + 2):
        in_step = {rid: 1}
        first.add(request(rid, str(rid)), heard.append, sent=True)
        first.died(one.note())
        first.judge(in_step)
        (left,) = first.leave(in_step)
        assert second.adopt(left, in_step, sent=True) is not None
        second.died(two.note())
        second.judge(in_step)
        assert second.leave(in_step) == list(second.resume(in_step)) == []
        assert (heard[-1].rid, heard[-1].finish) == (rid, "error")
        one.check(1)
        two.check(1)
    assert one.count == MAX_RESTARTS + 2


def test_deaths_without_a_reason_are_counted_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    deaths = Deaths()
    for _ in range(MAX_RESTARTS):
        deaths.note()
        deaths.check(1)
    now[0] += RESTART_WINDOW_SECONDS + 1
    for _ in range(MAX_RESTARTS):
        deaths.note()
        deaths.check(1)
    deaths.note().explained = True
    deaths.check(1)
    deaths.note()
    with pytest.raises(ServerUnavailable, match="died 4 times, last code 7"):
        deaths.check(7)


def test_a_client_is_suspended_for_as_long_as_its_requests_killed_too_many_engines() -> None:
    now = [0.0]
    culprits = Culprits(lambda: now[0])
    for number in range(MAX_CULPRITS):
        assert culprits.refusal("one") is None
        now[0] = 100.0 * number
        culprits.note("one")
        culprits.note(f"other {number}")
    refusal = culprits.refusal("one")
    assert refusal is not None and refusal.code == "client_suspended"
    assert f"suspended for {WINDOW_SECONDS - now[0]:.0f} s" in str(refusal)
    assert culprits.refusal("other 1") is None
    now[0] = WINDOW_SECONDS
    assert culprits.refusal("one") is None  # the first of them is forgotten
    culprits.note("one")
    assert culprits.refusal("one") is not None


def test_what_a_suspended_client_has_waiting_ends_and_nothing_of_others_does() -> None:
    heard, culprits = list[EngineOutput](), Culprits()
    in_flight, elsewhere = InFlight(culprits), InFlight(culprits)
    for rid in range(10):
        in_flight.add(request(rid, "other" if rid % 5 == 4 else "killer"), heard.append, sent=True)
        elsewhere.add(request(10 + rid, "killer"), heard.append, sent=True)
    for rid in range(MAX_CULPRITS):
        alone = {rid: 1}
        for _ in range(2):
            in_flight.judge(alone)
            resumed = [one.rid for one in in_flight.resume(alone)]
    assert resumed == [4, 9]
    codes = {update.rid: update.code for update in heard}
    assert sorted(codes) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [codes[rid] for rid in range(4)] == ["internal"] * 3 + ["client_suspended"]
    left = elsewhere.leave_all()[0]
    assert in_flight.adopt(left, {}, sent=True) is None  # nobody takes it over
    elsewhere.add(request(30, "killer"), heard.append, sent=True)
    elsewhere.judge({})
    assert elsewhere.leave({}) == list(elsewhere.resume({})) == []
    assert [(update.rid, update.code) for update in heard[-2:]] == [
        (10, "client_suspended"), (30, "client_suspended"),
    ]  # fmt: skip


class Doomed:
    """An engine at a place of the test's: it dies when it is told to."""

    def __init__(self) -> None:
        self.step: dict[int, int] = {}
        self._dead = asyncio.Event()

    def send(self, message: ToEngine) -> None: ...

    async def ready(self) -> Ready:
        return Ready(0, 64, 16, 512, 1024, 300, "cpu", "float32")

    async def ended(self) -> int:
        await self._dead.wait()
        return -9

    def in_step(self) -> dict[int, int]:
        return self.step

    def kill(self) -> None:
        self._dead.set()

    async def end(self, patience: float = 0.0) -> None:
        self._dead.set()

    def close(self) -> None: ...


class Graves:
    """The place."""

    patient = False

    def __init__(self) -> None:
        self.engines: list[Doomed] = []
        self.given_up: list[str] = []
        """Why."""

    def open(self, hear: Callable[[FromEngine], None]) -> Doomed:
        self.engines.append(Doomed())
        return self.engines[-1]

    def close(self) -> None: ...

    async def die(self, client: EngineClient, step: dict[int, int]) -> None:
        """In such a step; waits for the next one, or until it is given up."""
        engine = self.engines[-1]
        engine.step = step
        engine.kill()
        await until(lambda: bool(self.given_up) or (self.engines[-1] != engine and client.healthy))


async def test_who_is_found_at_a_death_is_blamed_before_the_death_counts() -> None:
    """It is one too many, if nothing explains it: two have no reason, and two this one."""
    place, heard = Graves(), list[EngineOutput]()
    client = await EngineClient.start(EngineConfig(), place.given_up.append, place=place)
    for _ in range(MAX_RESTARTS - 1):
        await place.die(client, {})
    client.submit(request(7, "a"), heard.append)
    for _ in range(2):
        await place.die(client, {7: 9})
    assert (place.given_up, client.healthy) == ([], True)
    assert [(update.rid, update.code) for update in heard] == [(7, "internal")]
    await client.stop()


async def test_an_engine_that_cannot_be_started_for_a_moment_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rootlace.runtime.engine.client.engine_client.RETRY_SECONDS", (0.001,) * 2)
    place, heard = Graves(), list[EngineOutput]()
    client = await EngineClient.start(EngineConfig(), place.given_up.append, place=place)
    opened = place.open
    wrong: list[Exception] = [OSError(24, "Too many open files"), InvalidRequest("/a/b: gone")]

    def fail(hear: Callable[[FromEngine], None]) -> Doomed:
        if wrong:
            raise wrong.pop()
        return opened(hear)

    monkeypatch.setattr(place, "open", fail)
    await place.die(client, {})
    assert (place.given_up, client.healthy) == ([], True)
    client.submit(request(7, "a"), heard.append)
    wrong += [OSError(24, "/a/b")] * 3
    place.engines[-1].kill()
    await until(lambda: bool(place.given_up))
    ((code, message),) = [(update.code, update.error) for update in heard]
    assert code == "unavailable" and "/a/b" not in message
    await client.stop()


async def test_who_is_suspended_for_a_death_leaves_for_no_other_engine_after_it() -> None:
    place, heard, left = Graves(), list[EngineOutput](), list[list[int]]()
    culprits = Culprits()
    for _ in range(MAX_CULPRITS - 1):
        culprits.note("bad")

    def on_death(those: list[Submitted], in_step: Mapping[int, int]) -> None:
        left.append([one.request.rid for one in those])
        for one in those:  # there is no other
            client.adopt(one, {})

    def ignore(*_: object) -> None: ...

    siblings = ReplicaContext(
        0, 2, b"key", ignore, on_death, lambda: None, ignore, Forgets(), culprits, int
    )
    client = await EngineClient.start(EngineConfig(), siblings=siblings, place=place)
    for rid, name in enumerate(("bad", "bad", "good")):
        client.submit(request(rid, name), heard.append)
    for _ in range(2):
        await place.die(client, {0: 9})
    assert left == [[0, 1, 2], [2]]
    codes = {update.rid: update.code for update in heard}
    assert codes == {0: "internal", 1: "client_suspended"}
    await client.stop()


async def test_what_stays_waits_for_the_next_engine_of_its_place() -> None:
    place, left = Graves(), list[list[int]]()

    def on_death(those: list[Submitted], in_step: Mapping[int, int]) -> None:
        left.append([one.request.rid for one in those])

    def ignore(*_: object) -> None: ...

    siblings = ReplicaContext(
        0, 2, b"key", ignore, on_death, lambda: None, ignore, Forgets(), Culprits(), int
    )
    client = await EngineClient.start(EngineConfig(), siblings=siblings, place=place)
    heard = list[EngineOutput]()
    client.submit(request(1, "a"), heard.append, stays=True)
    client.submit(request(2, "a"), heard.append)
    assert client.next_rid() == 0, "the number is that of all siblings"
    await place.die(client, {})
    assert left == [[2]] and not heard
    await client.stop()
    assert [update.rid for update in heard] == [1]
