"""Clients take turns: nobody's requests wait for all of another's."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.config import SchedulerConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.scheduler.queue import COMPUTED, WaitingQueue
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import Handling, SamplingParams

CLIENTS = "abcd"
ARRIVAL = st.tuples(st.sampled_from(CLIENTS), st.integers(1, 30))


def _queues(policy: str = "lpm") -> WaitingQueue:
    return WaitingQueue(SchedulerConfig(policy=policy), lambda sequence: 0)  # type: ignore[arg-type]


def _sequence(number: int, client: str, length: int = 1, priority: int = 0) -> RequestState:
    ids = np.full(length, number % 7, np.int32)
    params, handling = SamplingParams(max_tokens=4, seed=0), Handling(priority=priority)
    request = EngineRequest(number, ids, params, client=client, handling=handling)
    return RequestState(request, None, number, jumps=False, arrived=number, max_length=1 << 20)


def _take(queues: WaitingQueue) -> RequestState:
    found = queues.peek()
    assert found is not None
    queues.take(found)
    return found


def test_one_with_thousands_of_requests_delays_ten_with_one_each_by_one() -> None:
    queues, number = _queues("fcfs"), 0
    for number in range(3000):
        queues.add(_sequence(number, "greedy"))
    for _ in range(5):
        _take(queues)
    for client in range(10):
        queues.add(_sequence(number + 1 + client, f"client {client}"))
    clients = Counter(_take(queues).request.client for _ in range(12))
    assert clients["greedy"] <= 2 and len(clients) == 11
    # Alone again, it gets all.
    assert {_take(queues).request.client for _ in range(20)} == {"greedy"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(ARRIVAL, st.none(), st.none()), min_size=1, max_size=60),
    st.sampled_from(["fcfs", "lpm", "dfs"]),
)
def test_clients_who_wait_get_as_much_as_each_other(steps, policy) -> None:
    """Of any two waiting clients, neither gets more than one request of each ahead of the other.
    And each request is admitted once (or leaves)."""
    queues = _queues(policy)
    waiting: dict[str, list[RequestState]] = {client: [] for client in CLIENTS}
    got = dict.fromkeys(CLIENTS, 0)
    since: dict[tuple[str, str], int] = {}
    most = 0
    for number, step in enumerate(steps):
        if step is not None:
            client, length = step
            waiting[client].append(_sequence(number, client, length))
            queues.add(waiting[client][-1])
            most = max(most, COMPUTED * length)
        elif queues.count:
            taken = _take(queues)
            waiting[taken.request.client].remove(taken)
            got[taken.request.client] += COMPUTED * taken.length
        else:
            assert queues.peek() is None
        assert queues.count == sum(map(len, waiting.values())) == len(list(queues))
        for one, other in combinations(CLIENTS, 2):
            if not (waiting[one] and waiting[other]):
                since.pop((one, other), None)
                continue
            ahead = got[one] - got[other]
            began = since.setdefault((one, other), ahead)
            assert abs(ahead - began) <= 2 * most
    for sequence in [one for queue in waiting.values() for one in queue]:
        queues.remove(sequence)
    assert not queues.count and queues.peek() is None


def test_a_short_request_waits_for_no_round_of_long_ones() -> None:
    """Thirty clients with long prompts came at once; then one comes with a token at a time."""
    queues, number = _queues(), 0
    for number in range(300):
        queues.add(_sequence(number, f"client {number % 30}", 40))
    for _ in range(4):
        _take(queues)
    waits = []
    for number in range(300, 340):
        queues.add(_sequence(number, "short"))
        waits.append(0)
        while _take(queues).request.client != "short":
            waits[-1] += 1
    # Its share is as large as another's, however small its requests: now and then it waits.
    assert waits[0] <= 1 and np.mean(waits) < 2, waits


@pytest.mark.parametrize("waiting", [4, 60, 256])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_long_request_waits_for_two_rounds_of_short_ones(waiting: int, length: int) -> None:
    """Each short one is of another client; as many come as are admitted."""
    queues = _queues()
    for number in range(waiting):
        queues.add(_sequence(number, f"client {number}", length))
    for number in range(waiting, 2 * waiting):
        _take(queues)
        queues.add(_sequence(number, f"client {number}", length))
    queues.add(_sequence(-1, "long", 4000))
    for taken in range(3 * waiting + 100):
        if _take(queues).request.client == "long":
            break
        queues.add(_sequence(2 * waiting + taken, f"client {2 * waiting + taken}", length))
    assert taken <= 2 * waiting + 2


def test_output_counts() -> None:
    """A client whose requests generate much waits longer for the next."""
    queues = _queues("fcfs")
    for number in range(6):
        queues.add(_sequence(number, "ab"[number % 2]))
    talkative = _take(queues)
    talkative.outputs = 2
    queues.ended(talkative)
    order = [_take(queues).request.client for _ in range(5)]
    assert talkative.request.client == "a" and order == ["b", "b", "b", "a", "a"]


def test_output_that_ends_while_nobody_waits_is_not_charged() -> None:
    queues = _queues("fcfs")
    queues.add(_sequence(0, "a"))
    early = _take(queues)
    early.outputs = 1000
    queues.ended(early)
    for number in range(1, 9):
        queues.add(_sequence(number, "b" if number < 8 else "a"))
    assert "a" in [_take(queues).request.client for _ in range(3)]


def test_clients_who_are_always_new_do_not_come_before_everybody() -> None:
    queues = _queues("fcfs")
    for number in range(6):
        queues.add(_sequence(number, "abc"[number % 3]))
    taken = []
    for number in range(6, 40):
        taken.append(_take(queues).request.client)
        queues.add(_sequence(number, f"new {number}"))
    assert [taken.count(client) for client in "abc"] == [2, 2, 2]


def test_the_last_places_of_the_queue_are_for_those_who_hold_few() -> None:
    waiting = _queues("fcfs")
    number = 0
    while not waiting.crowds_out(("greedy", "", ""), 16):
        waiting.add(_sequence(number, "greedy"))
        number += 1
    assert number == 14
    for client in ("a", "b"):
        assert not waiting.crowds_out((client, "", ""), 16)
        waiting.add(_sequence(number, client))
        number += 1
    assert all(waiting.crowds_out((client, "", ""), 16) for client in ("greedy", "a", "new"))


def test_a_newcomer_waits_for_no_client_of_a_higher_priority() -> None:
    """Long requests of a priority that is served all the time do not push newcomers behind."""
    queues = WaitingQueue(SchedulerConfig(policy="fcfs"), lambda sequence: 0)
    for number in range(5):
        queues.add(_sequence(number, "urgent", 100, priority=1))
        for client in "ab":
            queues.add(_sequence(number, client))
    for number in range(5, 1005):
        taken = _take(queues)
        priority = taken.request.handling.priority
        queues.add(_sequence(number, taken.request.client, taken.length, priority=priority))
    queues.add(_sequence(1005, "new"))
    for number in range(1006, 1500):
        taken = _take(queues)
        if taken.request.client == "new":
            break
        priority = taken.request.handling.priority
        queues.add(_sequence(number, taken.request.client, taken.length, priority=priority))
    assert number < 1100
