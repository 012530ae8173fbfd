"""Engines that hosts start for a gateway of another machine: here both are in one process, and talk
over TCP. Stubs stand in the engines' place."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import zmq

from rootlace.runtime import processes
from rootlace.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.replicas.remote import Host, Line, LineAddress, Meeting, RemotePlace
from rootlace.runtime.replicas.replicas import Replicas
from rootlace.wire import sockets
from rootlace.wire.errors import Overloaded, ServerUnavailable
from rootlace.wire.protocol import SamplingParams
from tests.engine.stub_engine import DEADLY, ENDLESS
from tests.waiting import soon, until

KEY = bytes(16)
PARAMS = SamplingParams(max_tokens=1, seed=0)


class Cluster:
    """A gateway's replicas, and hosts."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.meeting = Meeting("127.0.0.1")
        self.hosts: list[Host] = []
        self.replicas: Replicas

    async def add(self) -> Host:
        host = Host(self._config, KEY, self._attach)
        self.hosts.append(host)
        await host.start()
        return host

    async def start(self, engines: int) -> None:
        starting = [asyncio.create_task(self.add()) for _ in range(engines)]
        replicas = Replicas.start(self._config, 3, meeting=self.meeting, digest_key=KEY)
        self.replicas = await soon(replicas)
        await asyncio.gather(*starting)
        await until(lambda: self.up() == engines)

    def up(self) -> int:
        return len(self.replicas._up)

    def run(self, token: int) -> Heard:
        return Heard(self.replicas, token)

    async def close(self) -> None:
        await self.replicas.stop()
        for host in self.hosts:
            await host.leave(0.0)
        self.meeting.close()

    async def _attach(self) -> LineAddress | None:
        return self.meeting.attach()


class Heard:
    """One request and what was heard of it."""

    def __init__(self, replicas: Replicas, token: int) -> None:
        self.tokens: list[int] = []
        self.last: EngineOutput | None = None
        self.rid = replicas.next_rid()
        replicas.submit(EngineRequest(self.rid, np.array([token], np.int32), PARAMS), self.hear)

    def hear(self, update: EngineOutput) -> None:
        assert self.last is None, "an update after the last one"
        self.tokens += update.token_ids
        self.last = update if update.finish is not None else None

    async def end(self) -> EngineOutput:
        await until(lambda: self.last is not None)
        assert self.last is not None
        return self.last


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    def stub(module: str) -> list[str]:
        return [sys.executable, "-m", "tests.engine.stub_engine", str(tmp_path)]

    monkeypatch.setattr(processes, "child_command", stub)
    monkeypatch.chdir(Path(__file__).parents[2])
    found = Cluster(EngineConfig(scheduler=SchedulerConfig(max_waiting=3)))
    await found.start(2)
    yield found
    await found.close()


def engine_of(cluster: Cluster, request: Heard) -> int:
    """The number of the replica that has a request."""
    assert cluster.replicas._dispatch is not None
    at = cluster.replicas._dispatch.where(request.rid)
    assert at is not None
    return at


def host_of(cluster: Cluster, at: int) -> Any:
    """The host of the engine at a place."""
    pid = cluster.replicas._clients[at].info.pid
    (found,) = (
        host for host in cluster.hosts
        if (engine := host._engine) is not None and engine._process is not None
        and engine._process.pid == pid
    )  # fmt: skip
    return found


async def test_a_host_that_never_connects_costs_no_place(cluster: Cluster) -> None:
    (vacant,) = cluster.meeting.vacant
    assert cluster.meeting.attach() is not None and not cluster.meeting.vacant
    vacant.kill()  # as a line does that nobody came to
    await until(lambda: bool(cluster.meeting.vacant))
    await soon(cluster.add())
    await until(lambda: cluster.up() == 3)


async def test_requests_run_and_an_engine_that_dies_is_replaced(cluster: Cluster) -> None:
    done = await cluster.run(5).end()
    assert (done.token_ids, done.finish) == ((6,), "length")
    running = [cluster.run(ENDLESS) for _ in range(4)]
    await until(lambda: all(one.tokens for one in running))
    assert {engine_of(cluster, one) for one in running} == {0, 1}
    psutil.Process(cluster.replicas._clients[0].info.pid).kill()
    # Those that it had go on at the other one, from the token that they had.
    await until(lambda: all(engine_of(cluster, one) == 1 for one in running))
    await until(lambda: sorted(len(one.tokens) for one in running) == [1, 1, 2, 2])
    assert all(one.tokens == [ENDLESS + 1, ENDLESS + 2][: len(one.tokens)] for one in running)
    await until(lambda: cluster.up() == 2)
    stats = await cluster.replicas.stats()
    assert stats["running"] == 4 and stats["requests_moved"] == 2
    assert [one["replica"] for one in stats["replicas"]] == [0, 1]


async def test_a_request_that_kills_engines_is_given_up_as_on_one_machine(
    cluster: Cluster,
) -> None:
    deadly = await cluster.run(DEADLY).end()
    assert deadly.finish == "error" and "died twice" in deadly.error
    assert (await cluster.run(7).end()).token_ids == (8,)


async def test_a_lost_machine_is_noticed_and_what_ran_there_goes_on(cluster: Cluster) -> None:
    running = [cluster.run(ENDLESS) for _ in range(4)]
    await until(lambda: all(one.tokens for one in running))
    at = engine_of(cluster, running[0])
    aborted, other = (one for one in running if engine_of(cluster, one) == at)
    lost = host_of(cluster, at)
    lost._engine._process.send_signal(19)  # it does not hear that it is to end this request
    cluster.replicas.abort([aborted.rid])
    lost._line.close()
    # Nobody knows in which step it was, and perhaps there will never be another one in its place.
    assert (await aborted.end()).finish == "abort"
    assert {engine_of(cluster, one) for one in running if one is not aborted} == {1 - at}
    await until(lambda: len(other.tokens) == 2)
    assert sorted(len(one.tokens) for one in running) == [1, 1, 1, 2]
    lost._engine.kill()
    lost._parted.set()
    await until(lambda: cluster.up() == 2)


async def test_a_machine_that_falls_silent_is_noticed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes nothing. When it wakes up, others have what it had, and it begins anew."""
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(sockets, "SILENCE_MS", 1000)
    command = [sys.executable, "-m", "tests.replicas.host_process", str(tmp_path)]
    host = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    asks, told = host.stdout, host.stdin
    assert asks is not None and told is not None

    async def comes() -> None:
        await soon(asks.readline())
        told.write(msgspec.json.encode(cluster.meeting.attach()) + b"\n")
        await until(lambda: cluster.up() == 3)

    await comes()
    running = [cluster.run(ENDLESS) for _ in range(3)]
    await until(lambda: all(one.tokens for one in running))
    (there,) = (one for one in running if engine_of(cluster, one) == 2)
    host.send_signal(signal.SIGSTOP)
    await until(lambda: len(there.tokens) == 2)
    assert cluster.up() == 2 and engine_of(cluster, there) != 2
    host.send_signal(signal.SIGCONT)
    await comes()
    assert (there.tokens, there.last) == ([ENDLESS + 1, ENDLESS + 2], None)
    host.kill()
    await host.wait()


async def test_a_replica_that_leaves_ends_what_it_has_and_gets_nothing_new(
    cluster: Cluster,
) -> None:
    running = cluster.run(ENDLESS)
    await until(lambda: bool(running.tokens))
    at = engine_of(cluster, running)
    leaving = asyncio.create_task(host_of(cluster, at).leave(60.0))
    await until(lambda: at in cluster.replicas._leaving)
    later = [cluster.run(ENDLESS) for _ in range(3)]
    assert {engine_of(cluster, one) for one in later} == {1 - at}
    assert engine_of(cluster, running) == at and not leaving.done()
    cluster.replicas.abort([running.rid])
    await soon(leaving)
    assert running.last is not None and running.tokens == [ENDLESS + 1]
    await until(lambda: cluster.up() == 1)
    # Its place is another one's: a new host takes it.
    await cluster.add()
    await until(lambda: cluster.up() == 2)


async def test_what_does_not_end_in_time_goes_on_elsewhere(cluster: Cluster) -> None:
    running = [cluster.run(ENDLESS) for _ in range(2)]
    await until(lambda: all(one.tokens for one in running))
    await soon(host_of(cluster, engine_of(cluster, running[0])).leave(0.0))
    await until(lambda: len(running[0].tokens) == 2)
    assert running[0].tokens == [ENDLESS + 1, ENDLESS + 2] and running[0].last is None
    # Without any engine nothing answers, and nothing is lost.
    await soon(host_of(cluster, engine_of(cluster, running[0])).leave(0.0))
    await until(lambda: cluster.up() == 0)
    with pytest.raises(ServerUnavailable):
        await cluster.replicas.stats()
    waiting = cluster.run(8)
    await cluster.add()
    assert (await waiting.end()).token_ids == (9,)
    await until(lambda: len(running[0].tokens) == 3)


async def test_while_all_are_away_few_wait_and_who_goes_is_gone(cluster: Cluster) -> None:
    for host in cluster.hosts:
        await soon(host.leave(0.0))
    await until(lambda: cluster.up() == 0)
    first, *others = (cluster.run(token) for token in (5, 6, 7))
    with pytest.raises(Overloaded, match="at most 3 requests may wait for an engine"):
        cluster.run(8)
    cluster.replicas.abort([first.rid])
    assert first.last is not None and first.last.finish == "abort"
    others.append(cluster.run(8))
    await cluster.add()
    assert [(await one.end()).token_ids for one in others] == [(7,), (8,), (9,)]
    assert not cluster.replicas._dispatch._running, "who was refused is forgotten, too"  # type: ignore[union-attr]


async def test_a_request_does_not_wait_for_a_place_that_stays_empty(
    cluster: Cluster, tmp_path: Path
) -> None:
    running = [cluster.run(ENDLESS) for _ in range(2)]
    await until(lambda: all(one.tokens for one in running))
    (tmp_path / "hold").touch()  # no engine starts
    deadly = await cluster.run(DEADLY).end()
    assert deadly.finish == "error" and "died twice" in deadly.error
    assert cluster.up() == 0 and all(one.last is None for one in running)
    # A host was given the place for which they wait, and is not heard of again.
    assert {engine_of(cluster, one) for one in running} == {0}
    known = [len(one.tokens) for one in running]
    assert cluster.meeting.attach() is not None
    (tmp_path / "hold").unlink()
    await until(lambda: cluster.up() > 0)
    await until(lambda: all(len(one.tokens) > n for one, n in zip(running, known, strict=True)))
    assert 0 not in cluster.replicas._up


async def test_who_comes_is_told_what_was_forgotten_long_ago(cluster: Cluster) -> None:
    """Its disk may have been here before, at another place."""
    for client in cluster.replicas._clients:
        cache = CacheConfig(disk="somewhere")
        client._config = dataclasses.replace(client._config, cache=cache)
    cluster.replicas.forget_namespace("a")
    await cluster.add()
    await until(lambda: cluster.up() == 3)
    found = await cluster.replicas.stats()
    assert [one["forgotten"] for one in found["replicas"]] == [1, 1, 1]


async def test_who_does_not_know_the_key_is_nobody() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard: list[Any] = []
    lost = asyncio.Event()
    near, address = Line.open(context, "127.0.0.1", heard.append, lost.set)
    wrong = LineAddress(address.to_engine, address.from_engine, zmq.curve_keypair()[0])
    stranger = Line.connect(context, wrong, heard.append, lost.set)
    far = Line.connect(context, address, heard.append, lost.set)
    await until(lambda: near.there and far.there)
    near.pipes.send(EngineRequest(1, np.array([3], np.int32), PARAMS))
    await until(lambda: len(heard) == 1)
    assert not stranger.there
    # Strangers come and go; the line is lost with its other end.
    stranger.close()
    near.pipes.send(EngineRequest(2, np.array([3], np.int32), PARAMS))
    await until(lambda: len(heard) == 2)
    assert not lost.is_set()
    far.close()
    await soon(lost.wait())
    near.close()
    context.destroy(linger=0)


async def test_engines_for_prompts_alone_have_places_of_their_own() -> None:
    meeting = Meeting("127.0.0.1")
    places = [RemotePlace(meeting, at, lambda: False, lambda: None, at == 2) for at in range(3)]
    engines = [place.open(lambda _: None) for place in places]

    def taken() -> list[bool]:
        return [engine._line is not None for engine in engines]

    assert meeting.attach(prefill=True) and taken() == [False, False, True]
    assert meeting.attach(prefill=True) is None
    assert meeting.attach() and meeting.attach() and taken() == [True] * 3
    assert meeting.attach() is None
    for engine in engines:
        engine.close()
    meeting.close()
