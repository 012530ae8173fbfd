"""Pins after an engine's death: the next engine has them, or it is said that they are gone."""

import asyncio
import itertools
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    Abort,
    EngineOutput,
    EngineRequest,
    GetPins,
    PinnedPrefix,
    PinsLost,
    Unpin,
    Unpinned,
)
from rootlace.runtime.engine.client import cache_orders
from rootlace.runtime.engine.client.cache_orders import PinnedPrompts
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.wire.protocol import RequestFacts
from rootlace.wire.sampling import PRIORITIES, Cache, Handling
from tests.engine.test_client import PARAMS, client, kill
from tests.waiting import soon

__all__ = ["client"]


def request(rid: int, *tokens: int, ttl: float | None = None, namespace: str = "") -> EngineRequest:
    handling = Handling(cache=Cache(pin=True, ttl=ttl))
    return EngineRequest(
        rid,
        np.array(tokens, np.int32),
        PARAMS,
        namespace=namespace,
        adapter="a",
        handling=handling,
        client="key",
        max_pins=3,
    )


async def pin(client: EngineClient, *tokens: int, ttl: float | None = None) -> None:
    ended = asyncio.Event()

    def hear(update: EngineOutput) -> None:
        assert update.facts and update.facts.pin
        ended.set()

    client.submit(request(client.next_rid(), *tokens, ttl=ttl, namespace="n"), hear)
    await soon(ended.wait())


async def pins(client: EngineClient) -> dict[str, PinnedPrefix]:
    while not client.healthy:
        await asyncio.sleep(0.01)
    return {one.id: one for one in await client.ask(GetPins)}


async def counted(client: EngineClient, restored: int, lost: int) -> None:
    while True:
        stats = await client.stats()
        if (stats["pins_restored"], stats["pins_lost"]) == (restored, lost):
            return
        await asyncio.sleep(0.01)


async def test_pins_outlive_their_engine(client: EngineClient) -> None:
    await pin(client, 1, 2, 3, ttl=500.0)
    await pin(client, 5)
    assert await client.ask(Unpin, "pin 5", "another") is True  # the stub lets anybody's go
    for deaths in (1, 2):
        await kill(client)
        await pins(client)
        await soon(counted(client, deaths, 0))
        again = await pins(client)
        assert list(again) == ["pin 3"]
        found = again["pin 3"]
        assert (found.namespace, found.adapter, found.tokens) == ("n", "a", 3)
        assert found.node == 0, "tokens were generated"
        assert 400 < found.seconds_left < 500
    assert await client.ask(Unpin, "pin 3", "n") is True
    await kill(client)
    assert not await pins(client)


async def test_a_pin_without_room_is_said_to_be_lost(
    client: EngineClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await pin(client, 1, 2, 3)
    (tmp_path / "full").touch()
    await kill(client)
    await pins(client)
    await soon(counted(client, 0, 1))
    said = [one for one in caplog.records if one.name == cache_orders.__name__]
    assert [one.levelno for one in said] == [logging.WARNING]
    assert "3 tokens is not pinned any more: there is no room" in said[0].getMessage()
    assert not await pins(client)


async def test_what_is_let_go_before_it_is_pinned_again_stays_away(
    client: EngineClient, tmp_path: Path
) -> None:
    await pin(client, 1, 2, 3)
    (tmp_path / "busy").touch()
    await kill(client)
    while not client.healthy:
        await asyncio.sleep(0.01)
    letting = asyncio.create_task(client.ask(Unpin, "pin 3", "n"))
    await asyncio.sleep(0)
    (tmp_path / "busy").unlink()
    assert await soon(letting) is True
    await kill(client)
    assert not await pins(client)


class Engine:
    """Engine that pins its prompts again after a number of further messages, and sends a turn's
    updates together."""

    def __init__(self, client: Any, after: int) -> None:
        self.sent: list[Any] = []
        self.pins: set[str] = set()
        self._client = client
        self._waiting = {message.rid for message in client.given}
        self._after = after

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def turn(self) -> None:
        told: list[Any] = []
        sent, self.sent = self.sent, []
        for message in [*sent, None]:
            if self._after == 0:
                facts = RequestFacts(pin="p")
                told += [EngineOutput(rid, finish="length", facts=facts) for rid in self._waiting]
                self.pins |= {"p"} if self._waiting else set()
                self._waiting.clear()
            self._after -= message is not None
            if isinstance(message, Abort):
                told += [
                    EngineOutput(rid, finish="abort") for rid in {*message.rids} & self._waiting
                ]
                self._waiting -= {*message.rids}
            elif isinstance(message, Unpin):
                told.append(Unpinned(message.ticket, message.pin in self.pins))
                self.pins.discard(message.pin)
        for message in told:
            self._client._handle(message)


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_what_is_let_go_while_it_is_pinned_again_stays_away(after: int) -> None:
    client: Any = EngineClient(EngineConfig())
    client._pinned.note("p", request(client.next_rid(), 1, 2, namespace="n"))
    client._up, client.given = True, []
    for pin, again in client._pinned.again(client.next_rid):
        client.submit(again, partial(client._pinned.handle, pin), stays=True)
        client.given.append(again)
    engine = client._engine = Engine(client, after)
    letting = asyncio.create_task(client.ask(Unpin, "p", "n"))
    for _ in range(3):
        await asyncio.sleep(0)
        engine.turn()
    assert await soon(letting) is True
    assert not engine.pins and not list(client._pinned.again(client.next_rid))
    client._pinned.note("p", request(client.next_rid(), 1, 2))  # as anybody may again
    assert len(list(client._pinned.again(client.next_rid))) == 1


async def test_what_a_failed_step_loses_is_pinned_again() -> None:
    client: Any = EngineClient(EngineConfig())
    client._pinned.note("p", request(client.next_rid(), 1, 2, namespace="n"))
    client._up, client.given = True, []
    engine = client._engine = Engine(client, 0)
    for restored in (1, 2):
        client._handle(PinsLost(1))
        client._handle(PinsLost(1))  # it waits to be pinned again anyway
        [again] = engine.sent
        assert again.token_ids.tolist() == [1, 2] and again.handling.cache.pin == "try"
        engine._waiting, engine._after = {again.rid}, 0
        engine.turn()
        assert (client._pinned.restored, client._pinned.lost) == (restored, 0)
    client._handle(PinsLost(1))
    client._handle(
        EngineOutput(engine.sent[0].rid, finish="error", code="x", error="there is no room")
    )
    assert (client._pinned.restored, client._pinned.lost) == (2, 1)


def test_what_is_pinned_again_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    known, rids = PinnedPrompts(lambda: now), itertools.count(100).__next__
    known.note("a", request(1, 1, ttl=10.0))
    known.note("b", request(2, 2, 3, ttl=30.0))
    known.note("c", request(3, 4))
    now = 5.0
    known.note("a", request(4, 1, ttl=20.0))  # until 25
    known.note("b", request(5, 2, 3, ttl=1.0))  # until 30 still
    now = 20.0
    again = dict(known.again(rids))
    assert {name: one.handling.cache.ttl for name, one in again.items()} == {
        "a": 5.0, "b": 10.0, "c": 280.0,
    }  # fmt: skip
    one = again["b"]
    assert (one.rid, one.token_ids.tolist(), one.params.max_tokens) == (101, [2, 3], 0)
    assert (one.client, one.max_pins, one.adapter, one.resumed) == ("key", 3, "a", True)
    assert (one.handling.priority, one.handling.cache.pin) == (-PRIORITIES, "try")
    # It dies again: what was not pinned yet waits in the queue of requests anyway.
    known.note("b", one)
    known.handle("b", EngineOutput(one.rid, facts=RequestFacts(pin="b"), finish="length"))
    known.handle("c", EngineOutput(again["c"].rid, finish="error", code="x", error="y"))
    assert (known.restored, known.lost) == (1, 1)
    assert [name for name, _ in known.again(rids)] == ["b"]
    aborted: list[int] = []
    assert not known.release(aborted.extend, "b", "other")
    assert known.release(aborted.extend, "b", "") and aborted == [103]
    now = 26.0
    assert not list(known.again(rids))
    assert not known.release(aborted.extend, "a", None) and aborted == [103]
    # No more is kept than has room.
    monkeypatch.setattr(cache_orders, "MAX_PINNED_TOKENS", 4)
    for name in "wxyz":
        known.note(name, request(9, 1, 1))
    known.note("w", request(10, 1, 1))  # renewed, so that it is the latest
    assert known.lost == 1
    with caplog.at_level(logging.WARNING):
        assert [name for name, _ in known.again(rids)] == ["z", "w"]
    assert known.lost == 3
    assert [one.getMessage().partition(":")[0] for one in caplog.records[-2:]] == [
        "a pinned prompt of 2 tokens is not pinned any more"
    ] * 2
