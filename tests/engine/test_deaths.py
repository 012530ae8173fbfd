"""Deaths of engines: which of them count, and who is to be kept from causing more."""

import asyncio
import itertools
import random
from collections.abc import Callable

import msgspec
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
from rootlace.runtime.engine.client import restarts
from rootlace.runtime.engine.client.cache_orders import Forgets
from rootlace.runtime.engine.client.engine_client import EngineClient, ReplicaContext
from rootlace.runtime.engine.client.restarts import (
    GUILTY_SECONDS,
    MAX_GUILTY,
    MAX_LOST,
    MAX_RESTARTS,
    RESTART_WINDOW_SECONDS,
    PendingRequest,
    RestartPolicy,
    Suspensions,
)
from rootlace.wire.errors import ClientSuspended, InvalidRequest, ServerUnavailable
from rootlace.wire.protocol import SamplingParams
from tests.waiting import until


def request(rid: int, client: str) -> EngineRequest:
    return EngineRequest(rid, np.array([1], np.int32), SamplingParams(max_tokens=1), client=client)


def tell(policy: RestartPolicy, rid: int, *tokens: int) -> None:
    """Note tokens of a request, as the client does."""
    policy.requests[rid].heard = True
    policy.requests[rid].output_ids += tokens


def sent(policy: RestartPolicy) -> list[tuple[int, int]]:
    """Return the requests for the next engine, with the length up to which each is computed
    alone."""
    return [(one.rid, one.suspected) for one in policy.resume()]


def test_a_guilty_request_explains_the_deaths_of_both_replicas() -> None:
    """Each guilty request is found at the second engine, and also caused the first engine's
    death."""
    heard, suspensions = list[EngineOutput](), Suspensions()
    first, second = RestartPolicy(suspensions), RestartPolicy(suspensions)
    for rid in range(MAX_RESTARTS + 2):
        first.add(request(rid, str(rid)), heard.append, sent=True)
        first.died({rid: 1})
        (left,) = first.leave()
        assert second.adopt(left, up=True) is not None
        second.died({rid: 1})
        assert second.leave() == second.resume() == []
        assert (heard[-1].rid, heard[-1].finish) == (rid, "error")
        first.check_restart(1)
        second.check_restart(1)
    assert first.deaths == MAX_RESTARTS + 2


def test_requests_of_the_dying_step_are_computed_alone_as_far_as_it_went() -> None:
    """So the second death has one request in its step, and the other requests are cleared."""
    heard, policy = list[EngineOutput](), RestartPolicy()
    for rid in range(3):
        policy.add(request(rid, "a"), heard.append, sent=True)
    for _ in range(2):  # the second time, 0 and 2 come with another request that is guilty
        policy.died({0: 7, 1: 9})
        assert sent(policy) == [(0, 7), (1, 9), (2, 0)]
        policy.died({1: 9})
        assert [(update.rid, update.finish) for update in heard] == [(1, "error")]
        assert "died twice" in heard.pop().error
        assert sent(policy) == [(0, 0), (2, 0)]
        policy.add(request(1, "b"), heard.append, sent=True)
        policy.requests[2] = policy.requests.pop(2)


def test_a_failure_of_several_requests_together_ends_with_the_third_death() -> None:
    heard, policy = list[EngineOutput](), RestartPolicy()
    for rid in range(3):
        policy.add(request(rid, "a"), heard.append, sent=True)
    for _ in range(2):
        policy.died({0: 7, 1: 9})
        assert sent(policy) == [(0, 7), (1, 9), (2, 0)]
    policy.died({0: 7, 1: 9})
    assert [(update.rid, update.finish) for update in heard] == [(0, "error"), (1, "error")]
    assert sent(policy) == [(2, 0)]
    policy.check_restart(1)


def test_an_engine_that_dies_in_no_step_died_of_a_request_not_heard_of() -> None:
    """A constraint that is compiled, for example. Tokens go on behind those that were heard."""
    heard, policy = list[EngineOutput](), RestartPolicy()
    for rid in range(2):
        policy.add(request(rid, "a"), heard.append, sent=True)
    tell(policy, 0, 5, 6)
    policy.died({})
    policy.add(request(2, "a"), heard.append, sent=False)
    resumed = policy.resume()
    assert [(one.rid, one.suspected, one.resumed) for one in resumed] == [
        (1, 1, True), (2, 0, False), (0, 0, True),
    ]  # fmt: skip
    assert resumed[-1].output_ids.tolist() == [5, 6]
    tell(policy, 2, 5)
    policy.died({})
    assert [(one.rid, one.code) for one in heard if one.finish] == [(1, "ends_engine")]
    assert sorted(one.rid for one in policy.resume()) == [0, 2]


def begins(order: list[list[int]]) -> list[int]:
    """Return the token counts at which the requests begin, if shared prefixes are computed once."""
    known: set[tuple[int, ...]] = set()
    found = []
    for text in order:
        known |= {tuple(text[: end + 1]) for end in range(len(text))}
        found.append(len(known))
    return found


def test_requests_resume_in_the_order_in_which_they_begin_soonest() -> None:
    dice = random.Random(3)
    for _ in range(60):
        texts = [
            [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
            for _ in range(dice.randrange(1, 6))
        ]
        policy = RestartPolicy()
        for rid, text in enumerate(texts):
            half = len(text) // 2 + 1
            one = msgspec.structs.replace(
                request(rid, ""),
                token_ids=np.array(text[:half], np.int32),
                output_ids=np.array(text[half:], np.int32),
            )
            policy.add(one, lambda _: None, sent=True)
        policy.died({})
        order = [texts[one.rid] for one in policy.resume()]
        assert sorted(order) == sorted(texts)
        best = min(sum(begins(list(each))) for each in itertools.permutations(texts))
        assert sum(begins(order)) == best


def test_namespaces_share_nothing_when_requests_resume() -> None:
    policy = RestartPolicy()
    for rid, (namespace, length) in enumerate([("a", 9), ("b", 7), ("a", 10), ("b", 3)]):
        one = msgspec.structs.replace(
            request(rid, ""), token_ids=np.ones(length, np.int32), namespace=namespace
        )
        policy.add(one, lambda _: None, sent=True)
    policy.died({})
    assert [one.rid for one in policy.resume()] == [3, 1, 0, 2]


def test_of_very_many_requests_the_rest_follows_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MOST_ORDERED", 3)
    policy = RestartPolicy()
    for rid, length in enumerate([9, 5, 7, 3, 1, 2]):
        one = msgspec.structs.replace(request(rid, ""), token_ids=np.full(length, rid, np.int32))
        policy.add(one, lambda _: None, sent=True)
    policy.died({})
    assert [one.rid for one in policy.resume()] == [1, 2, 0, 3, 4, 5]


def test_lost_machines_accuse_nobody_but_are_counted() -> None:
    heard, policy = list[EngineOutput](), RestartPolicy()
    policy.add(request(0, "a"), heard.append, sent=True)
    for _ in range(MAX_LOST - 1):
        policy.died(None)
        assert sent(policy) == [(0, 0)]
    policy.died(None)
    assert [update.code for update in heard] == ["internal"]


def test_an_aborted_request_ends_with_its_engine() -> None:
    heard, policy = list[EngineOutput](), RestartPolicy()
    for rid in range(2):
        policy.add(request(rid, "a"), heard.append, sent=True)
    assert policy.abort([1, 9], up=True) == (1,), "the engine is to end it"
    assert not heard
    policy.died({0: 3})
    assert [(update.rid, update.finish) for update in heard] == [(1, "abort")]
    assert policy.abort([0], up=False) == ()
    assert [update.finish for update in heard] == ["abort", "abort"] and not policy.resume()


def test_deaths_without_a_reason_are_counted_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    policy = RestartPolicy()
    for _ in range(2):
        for _ in range(MAX_RESTARTS):
            policy.note_death().at = now[0]
            policy.check_restart(1)
        now[0] += RESTART_WINDOW_SECONDS + 1
    now[0] -= RESTART_WINDOW_SECONDS + 1
    policy.note_death().explained = True
    policy.check_restart(1)
    policy.note_death().at = now[0]
    with pytest.raises(ServerUnavailable, match="died 4 times, last code 7"):
        policy.check_restart(7)


def test_a_client_is_suspended_for_as_long_as_its_requests_killed_too_many_engines() -> None:
    now = [0.0]
    suspensions = Suspensions(lambda: now[0])
    for number in range(MAX_GUILTY):
        assert suspensions.refusal("one") is None
        now[0] = 100.0 * number
        suspensions.note("one")
        suspensions.note(f"other {number}")
    refusal = suspensions.refusal("one")
    assert refusal is not None and refusal.code == "client_suspended"
    assert f"suspended for {GUILTY_SECONDS - now[0]:.0f} s" in str(refusal)
    assert suspensions.refusal("other 1") is None
    now[0] = GUILTY_SECONDS
    assert suspensions.refusal("one") is None  # the first of them is forgotten
    suspensions.note("one")
    assert suspensions.refusal("one") is not None


def test_what_a_suspended_client_has_waiting_ends_and_nothing_of_others_does() -> None:
    heard, suspensions = list[EngineOutput](), Suspensions()
    policy, elsewhere = RestartPolicy(suspensions), RestartPolicy(suspensions)
    for rid in range(10):
        policy.add(request(rid, "other" if rid % 5 == 4 else "killer"), heard.append, sent=True)
    for rid in (10, 11):
        elsewhere.add(request(rid, "killer"), heard.append, sent=True)
    for rid in range(MAX_GUILTY):
        for _ in range(2):
            policy.died({rid: 1})
            resumed = [one.rid for one in policy.resume()]
    assert resumed == [4, 9]
    codes = {update.rid: update.code for update in heard}
    assert sorted(codes) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [codes[rid] for rid in range(4)] == ["ends_engine"] * 3 + ["client_suspended"]
    with pytest.raises(ClientSuspended):
        policy.add(request(12, "killer"), heard.append, sent=True)
    left = elsewhere.leave()[0]
    assert policy.adopt(left, up=True) is None  # nobody takes it over
    elsewhere.requests[11] = PendingRequest(request(11, "killer"), heard.append, engines=1)
    elsewhere.died({})
    assert elsewhere.leave() == elsewhere.resume() == []
    assert [(update.rid, update.code) for update in heard[-2:]] == [
        (10, "client_suspended"), (11, "client_suspended"),
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
    assert [(update.rid, update.code) for update in heard] == [(7, "ends_engine")]
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
    suspensions = Suspensions()
    for _ in range(MAX_GUILTY - 1):
        suspensions.note("bad")

    def on_death(those: list[PendingRequest]) -> None:
        left.append([one.request.rid for one in those])
        for one in those:  # there is no other
            client.adopt(one)

    def ignore(*_: object) -> None: ...

    siblings = ReplicaContext(
        0, 2, b"key", ignore, on_death, lambda: None, ignore, Forgets(), suspensions, int
    )
    client = await EngineClient.start(EngineConfig(), siblings=siblings, place=place)
    for rid, name in enumerate(("bad", "bad", "good")):
        client.submit(request(rid, name), heard.append)
    for _ in range(2):
        await place.die(client, {0: 9})
    assert left == [[0, 1, 2], [2]]
    codes = {update.rid: update.code for update in heard}
    assert codes == {0: "ends_engine", 1: "client_suspended"}
    await client.stop()


async def test_what_stays_waits_for_the_next_engine_of_its_place() -> None:
    place, left = Graves(), list[list[int]]()

    def on_death(those: list[PendingRequest]) -> None:
        left.append([one.request.rid for one in those])

    def ignore(*_: object) -> None: ...

    siblings = ReplicaContext(
        0, 2, b"key", ignore, on_death, lambda: None, ignore, Forgets(), Suspensions(), int
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
