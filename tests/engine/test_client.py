"""The gateway's end of the engine, with a stub in the engine's place that can be killed."""

import asyncio
import dataclasses
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rootlace.runtime import processes
from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    STEPS,
    EngineOutput,
    EngineRequest,
    Flush,
    ForgetNamespace,
    read_step_record,
)
from rootlace.runtime.engine.client import engine_client
from rootlace.runtime.engine.client.cache_orders import (
    FORGET_SECONDS,
    MAX_FORGETS,
    SPARE_LINES,
    ForgetFile,
    Forgets,
)
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.runtime.engine.core import step_record, write_down
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.protocol import SamplingParams
from tests.engine.stub_engine import DEADLY, ENDLESS, SUDDEN
from tests.waiting import soon, until

PARAMS = SamplingParams(max_tokens=1, seed=0)


class Heard:
    """Request with its received updates."""

    def __init__(self, client: EngineClient, token: int) -> None:
        self.updates: list[EngineOutput] = []
        self.ended = asyncio.Event()
        self.rid = client.next_rid()
        client.submit(EngineRequest(self.rid, np.array([token], np.int32), PARAMS), self.hear)

    def hear(self, update: EngineOutput) -> None:
        assert not self.ended.is_set(), "an update after the last one"
        self.updates.append(update)
        if update.finish is not None:
            self.ended.set()

    async def end(self) -> EngineOutput:
        await soon(self.ended.wait())
        return self.updates[-1]


@pytest_asyncio.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    def stub(module: str) -> list[str]:
        return [sys.executable, "-m", "tests.engine.stub_engine", str(tmp_path)]

    monkeypatch.setattr(processes, "child_command", stub)
    monkeypatch.chdir(Path(__file__).parents[2])
    client = await EngineClient.start(EngineConfig())
    yield client
    await client.stop()


async def kill(client: EngineClient) -> None:
    """Kill the engine and wait until the client has noticed."""
    os.kill(client.info.pid, signal.SIGKILL)
    while client.healthy:
        await asyncio.sleep(0.01)


async def running(client: EngineClient) -> int:
    while not client.healthy:
        await asyncio.sleep(0.01)
    return int((await client.stats())["running"])


async def test_what_was_running_goes_on_in_the_next_engine(client: EngineClient) -> None:
    request = Heard(client, ENDLESS)
    while not request.updates:
        await asyncio.sleep(0.01)
    await kill(client)
    assert await running(client) == 1
    while len(request.updates) < 2:
        await asyncio.sleep(0.01)
    assert [u.token_ids for u in request.updates] == [(ENDLESS + 1,), (ENDLESS + 2,)]


async def test_what_is_submitted_while_the_engine_restarts_is_run_once(
    client: EngineClient, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    await kill(client)
    request = Heard(client, 1)
    await asyncio.sleep(0.1)
    endless = Heard(client, ENDLESS)
    (tmp_path / "hold").unlink()
    assert (await request.end()).token_ids == (2,)
    assert await running(client) == 1
    # No engine died with it before: one death more does not end it.
    await kill(client)
    assert await running(client) == 1
    assert not endless.ended.is_set()


async def test_what_is_aborted_while_the_engine_is_down_does_not_run_again(
    client: EngineClient, tmp_path: Path
) -> None:
    before, during = Heard(client, ENDLESS), Heard(client, ENDLESS)
    while not (before.updates and during.updates):
        await asyncio.sleep(0.01)
    (tmp_path / "hold").touch()
    client.abort([before.rid])
    await kill(client)
    late = Heard(client, ENDLESS)
    client.abort([during.rid, late.rid])
    (tmp_path / "hold").unlink()
    for request in (before, during, late):
        assert (await request.end()).finish == "abort"
    assert await running(client) == 0


async def test_an_engine_that_dies_as_it_starts_is_started_again(
    client: EngineClient, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    first = client._engine
    os.kill(client.info.pid, signal.SIGKILL)
    await until(lambda: client._engine is not first)
    second: Any = client._engine
    await until(lambda: second._process is not None)
    second.kill()
    (tmp_path / "hold").unlink()
    assert (await Heard(client, 1).end()).token_ids == (2,)


async def test_questions_wait_for_the_next_engine(client: EngineClient, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    await kill(client)
    asking = asyncio.create_task(client.stats())
    await asyncio.sleep(0.1)
    assert not asking.done()
    (tmp_path / "hold").unlink()
    assert (await soon(asking))["running"] == 0
    os.kill(client.info.pid, signal.SIGSTOP)  # one that was asked before it died
    asking = asyncio.create_task(client.stats())
    await asyncio.sleep(0)
    os.kill(client.info.pid, signal.SIGKILL)
    assert (await soon(asking))["running"] == 0
    (tmp_path / "hold").touch()
    await kill(client)
    asking = asyncio.create_task(client.stats())
    await asyncio.sleep(0)
    await client.stop()
    with pytest.raises(ServerUnavailable, match="stopping"):
        await soon(asking)


async def test_what_was_to_be_forgotten_while_an_engine_was_down_is_told_the_next(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = dataclasses.replace(client._config.cache, disk="somewhere")
    client._config = dataclasses.replace(client._config, cache=cache)
    await client.flush()
    client.forget_namespace("as it dies")
    (tmp_path / "hold").touch()
    await kill(client)
    monkeypatch.setattr(engine_client, "RESTART_SECONDS", 0.01)
    with pytest.raises(ServerUnavailable, match="not running"):
        await client.flush()
    client.forget_namespace("while it is down")
    request = Heard(client, 1)
    (tmp_path / "hold").unlink()
    await request.end()
    stats = await client.stats()
    assert stats["flushed"] == 1  # which covers what was before it
    assert stats["forgotten"] in (1, 2)  # it may have waited for this engine, too


def test_what_was_to_be_forgotten_is_told_until_all_have_heard_it() -> None:
    now = [0.0]
    forgets = Forgets(lambda: now[0])
    forgets.note(ForgetNamespace("one"))
    now[0] += FORGET_SECONDS + 1
    forgets.note(ForgetNamespace("two"))
    forgets.died()
    now[0] += 10 * FORGET_SECONDS
    forgets.note(ForgetNamespace("three"))
    forgets.died()
    known = [ForgetNamespace("two"), ForgetNamespace("three")]
    assert forgets.to_started(returned=True) == known
    now[0] += (
        10 * FORGET_SECONDS
    )  # the other one is still down, and may find the first one's folder
    assert forgets.to_started(returned=True) == known
    now[0] += FORGET_SECONDS + 1
    forgets.died()
    assert forgets.to_started(returned=True) == []
    for number in range(MAX_FORGETS + 1):
        forgets.note(ForgetNamespace(str(number)))
    forgets.died()
    assert forgets.to_started(returned=True) == [Flush(0)]
    forgets = Forgets(lambda: now[0], keep=True)
    forgets.note(ForgetNamespace("one"))
    now[0] += 10 * FORGET_SECONDS
    forgets.note(ForgetNamespace("two"))
    assert forgets.to_started(returned=False) == [ForgetNamespace("one"), ForgetNamespace("two")]


def test_what_was_to_be_forgotten_outlives_the_server(tmp_path: Path) -> None:
    """The server ends while an engine is down, or before the engine has completed a forget. Another
    server's model, or a second server of the same model, has its own file."""
    now = [0.0]

    servers = list[Forgets]()

    def server(model: str = "one") -> Forgets:
        servers.append(Forgets(lambda: now[0], ForgetFile(tmp_path / "disk", model)))
        return servers[-1]

    first = server()
    assert first.to_started(returned=False) == []
    for name in ("a", "b\n", "a"):
        first.note(ForgetNamespace(name))
    assert server().to_started(returned=False) == server("two").to_started(returned=False) == []
    first.close()
    first.close()
    second = server()
    known = [ForgetNamespace("b\n"), ForgetNamespace("a")]
    assert set(second.to_started(returned=False)) == set(known)
    second.died()
    now[0] += 10 * FORGET_SECONDS
    second.drop_old()  # a heartbeat: the engine that is down has not done it
    second.close()
    third = server()
    assert set(third.to_started(returned=False)) == set(known)
    now[0] += FORGET_SECONDS + 1
    third.drop_old()
    third.close()
    fourth = server()
    assert fourth.to_started(returned=False) == []
    for number in range(SPARE_LINES + 9):
        fourth.note(ForgetNamespace(str(number % 3)))
    (file,) = (path for path in (tmp_path / "disk").iterdir() if path.stat().st_size)
    assert len(file.read_bytes().splitlines()) <= SPARE_LINES + 6
    fourth.note(Flush(3))
    fourth.note(ForgetNamespace("c"))
    fourth.close()
    fifth = server()
    assert fifth.to_started(returned=False) == [Flush(0), ForgetNamespace("c")]
    fifth.close()
    file.write_bytes(b'"torn')
    assert server().to_started(returned=False) == [Flush(0)]
    for one in servers:
        one.close()


def test_a_full_disk_loses_nothing_that_was_to_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = Forgets(file=ForgetFile(tmp_path, "one"))
    for number in range(SPARE_LINES + 4):
        first.note(ForgetNamespace(str(number % 2)))
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        full.setattr(os, "pwrite", refuse)
        for number in range(2):  # what is of no use is to be left out now
            first.note(ForgetNamespace(str(number % 2)))
    assert "No space left" in caplog.text
    first.close()
    second = Forgets(file=ForgetFile(tmp_path, "one"))
    known = {ForgetNamespace("0"), ForgetNamespace("1")}
    assert set(second.to_started(returned=False)) == known
    second.close()


async def test_a_request_that_kills_engines_is_given_up(client: EngineClient) -> None:
    deadly = Heard(client, DEADLY)
    assert (await deadly.end()).finish == "error"
    assert "died twice" in deadly.updates[-1].error
    assert (await Heard(client, 1).end()).token_ids == (2,)


async def test_however_many_requests_kill_engines_each_ends_alone(client: EngineClient) -> None:
    other, deadly = Heard(client, ENDLESS), [Heard(client, DEADLY) for _ in range(2)]
    for one in deadly:
        assert "died twice" in (await one.end()).error
    assert not other.ended.is_set()
    assert await running(client) == 1


async def test_whoever_ran_beside_a_request_that_kills_engines_goes_on(
    client: EngineClient,
) -> None:
    others = [Heard(client, ENDLESS) for _ in range(3)]
    while not all(other.updates for other in others):
        await asyncio.sleep(0.01)
    deadly = [Heard(client, DEADLY)]
    assert "died twice" in (await deadly[0].end()).error
    assert await running(client) == 3
    for other in others:
        assert not other.ended.is_set()
        told = [u.token_ids[0] - ENDLESS for u in other.updates]
        assert told == list(range(1, len(told) + 1))  # the last words of an engine may be lost


async def test_whoever_is_there_when_engines_die_between_steps_goes_on(
    client: EngineClient,
) -> None:
    others = [Heard(client, ENDLESS) for _ in range(3)]
    while not all(other.updates for other in others):
        await asyncio.sleep(0.01)
    deadly, late = Heard(client, SUDDEN), Heard(client, 1)
    assert "died twice" in (await deadly.end()).error
    assert (await late.end()).token_ids == (2,)
    assert await running(client) == 3
    for other in others:
        assert not other.ended.is_set()
        told = [u.token_ids[0] - ENDLESS for u in other.updates]
        assert told == list(range(1, len(told) + 1))
    assert (await Heard(client, 1).end()).token_ids == (2,)


def test_a_record_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert read_step_record(path) == {}
    record = step_record(path, 4)
    assert read_step_record(path) == {}
    assert path.stat().st_blocks, "its place on the disk is not taken"
    rows = np.array([7, 9])
    write_down(record[0], rows, np.array([30, 40]))
    write_down(record[1], np.array([9, 1, 2, 3]), np.array([41, 5, 6, 8]))
    assert read_step_record(path) == {7: 30, 9: 41, 1: 5, 2: 6, 3: 8}
    record[1, 0] = 0
    assert read_step_record(path) == {7: 30, 9: 40}
    record[0, 0] = 0
    write_down(record[0], rows, np.array([31, 41]))
    assert read_step_record(path) == {7: 31, 9: 41}
    write_down(record[STEPS], (8,), 50)
    assert read_step_record(path) == {7: 31, 9: 41, 8: 50}
    record[STEPS, 0] = 0
    assert read_step_record(path) == {7: 31, 9: 41}


async def test_a_hung_engine_is_unhealthy_and_questions_do_not_wait_for_it(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.stats()
    assert client.healthy
    monkeypatch.setattr(engine_client, "STALL_SECONDS", 0.2)
    os.kill(client.info.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerUnavailable, match="has not answered"):
            await client.stats()
        assert not client.healthy
    finally:
        os.kill(client.info.pid, signal.SIGCONT)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the silence for a later `client`, which reads it once for each engine."""
    monkeypatch.setattr(engine_client, "SILENCE_SECONDS", 5.0)


@pytest.mark.slow
async def test_what_ran_on_a_suspended_engine_goes_on_in_the_next(
    short_silence: None, client: EngineClient
) -> None:
    request = Heard(client, ENDLESS)
    await until(lambda: bool(request.updates))
    first = client.info.pid
    os.kill(first, signal.SIGSTOP)
    await until(lambda: client.info.pid != first)
    await until(lambda: len(request.updates) > 1)
    assert [u.token_ids for u in request.updates] == [(ENDLESS + 1,), (ENDLESS + 2,)]


def test_an_engines_threads_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    assert processes.compute_environment() == {**os.environ, "OMP_WAIT_POLICY": "passive"}
    for name in settings:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1000")
            assert processes.compute_environment() == dict(os.environ)


async def test_the_engine_is_started_so(client: EngineClient) -> None:
    environment = Path(f"/proc/{client.info.pid}/environ")
    if not environment.exists():
        pytest.skip("no /proc to look at a process's environment")
    names = {entry.partition("=")[0] for entry in environment.read_text().split("\0")}
    assert names & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
