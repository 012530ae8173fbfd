"""Deaths of engines: which of them count, and who is to be kept from causing more."""

from __future__ import annotations

import numpy as np
import pytest

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.client.culprits import MAX_CULPRITS, WINDOW_SECONDS, Culprits
from rootlace.runtime.engine.client.deaths import MAX_RESTARTS, RESTART_WINDOW_SECONDS, Deaths
from rootlace.runtime.engine.client.in_flight import InFlight
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.protocol import SamplingParams


def request(rid: int, client: str) -> Request:
    return Request(rid, np.array([1], np.int32), SamplingParams(max_tokens=1), client=client)


def test_who_is_found_explains_the_deaths_of_all_engines_that_had_it() -> None:
    """Each of these is found at the second engine; it was the first one's death, too."""
    heard, culprits = list[Update](), Culprits()
    (first, second), (one, two) = (InFlight(culprits), InFlight(culprits)), (Deaths(), Deaths())
    for rid in range(MAX_RESTARTS + 2):
        in_step = {rid: 1}
        first.add(request(rid, str(rid)), heard.append, sent=True)
        first.died(one.note())
        (left,) = first.leave(in_step)
        assert second.adopt(left, in_step, sent=True) is not None
        second.died(two.note())
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
    heard, culprits = list[Update](), Culprits()
    in_flight, elsewhere = InFlight(culprits), InFlight(culprits)
    for rid in range(10):
        in_flight.add(request(rid, "other" if rid % 5 == 4 else "killer"), heard.append, sent=True)
        elsewhere.add(request(10 + rid, "killer"), heard.append, sent=True)
    for rid in range(MAX_CULPRITS):
        alone = {rid: 1}
        list(in_flight.resume(alone))
        resumed = [one.rid for one in in_flight.resume(alone)]
    assert resumed == [4, 9]
    codes = {update.rid: update.code for update in heard}
    assert sorted(codes) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [codes[rid] for rid in range(4)] == ["internal"] * 3 + ["client_suspended"]
    assert elsewhere.leave({}) == []  # they move nowhere, and end as soon as their engine is back
    assert list(elsewhere.resume({})) == []
