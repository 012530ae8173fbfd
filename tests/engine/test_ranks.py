"""An engine on several ranks ends with any of them, or with one that hangs, for its supervisor to
start another."""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest

from rootlace.runtime.assets import demo_model
from rootlace.runtime.config import CacheConfig, EngineConfig, ExecutorConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.engine.client import engine_client, restarts
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.wire.protocol import SamplingParams
from tests.processes import alive
from tests.waiting import soon, until


async def test_the_death_of_a_rank_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here none is started in its place, so that what its supervisor says of it is seen."""
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 0)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    executor = ExecutorConfig(model=str(demo_model()), tensor_parallel=2, threads=2)
    config = EngineConfig(executor=executor, cache=CacheConfig(16, 64))
    client = await EngineClient.start(config, ended.set_result)
    try:
        engine = psutil.Process(client.info.pid)
        (worker,) = [one for one in engine.children() if "ranks" in one.cmdline()[-1]]
        tokens: list[int] = []
        request = EngineRequest(1, np.array([5, 6], np.int32), SamplingParams(max_tokens=3, seed=0))
        client.submit(request, lambda update: tokens.extend(update.token_ids))
        await until(lambda: len(tokens) == 3)
        os.kill(worker.pid, signal.SIGKILL)
        assert "last code 1" in await soon(ended)
        assert not alive(engine)
    finally:
        await client.stop()


async def test_a_rank_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heart of rank 0 beats; its steps say how long one may take."""
    monkeypatch.setattr(engine_client, "LATE_SECONDS", 3.0)
    executor = ExecutorConfig(model=str(demo_model()), tensor_parallel=2, threads=2)
    client = await EngineClient.start(EngineConfig(executor=executor, cache=CacheConfig(16, 64)))
    try:
        first = psutil.Process(client.info.pid)
        (worker,) = [one for one in first.children() if "ranks" in one.cmdline()[-1]]

        async def tokens(rid: int) -> list[int]:
            found: list[int] = []
            params = SamplingParams(max_tokens=12, seed=0, temperature=1.0)
            client.submit(
                EngineRequest(rid, np.array([5, 6], np.int32), params),
                lambda update: found.extend(update.token_ids),
            )
            await until(lambda: len(found) == 12)
            return found

        expected = await tokens(1)
        worker.suspend()
        assert await tokens(2) == expected
        assert client.info.pid != first.pid and not alive(first) and not alive(worker)
    finally:
        await client.stop()
