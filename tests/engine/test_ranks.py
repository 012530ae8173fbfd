"""Engine on several ranks: it ends with any of them, or with one that hangs, so that its supervisor
starts another."""

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


async def test_a_rank_that_stands_still_is_replaced_and_the_death_of_one_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heart of rank 0 beats; its steps say how long one may take. Behind the second engine none
    is started, so that what its supervisor says of its death is seen."""
    monkeypatch.setattr(engine_client, "LATE_SECONDS", 3.0)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    executor = ExecutorConfig(model=str(demo_model()), tensor_parallel=2, threads=2)
    config = EngineConfig(executor=executor, cache=CacheConfig(16, 64))
    client = await EngineClient.start(config, ended.set_result)
    try:

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
        first, still = ranks_of(client)
        still.suspend()
        assert await tokens(2) == expected
        second, worker = ranks_of(client)
        assert second != first and not alive(first) and not alive(still)
        monkeypatch.setattr(restarts, "MAX_RESTARTS", 0)
        os.kill(worker.pid, signal.SIGKILL)
        assert "last code 1" in await soon(ended)
        assert not alive(second)
    finally:
        await client.stop()


def ranks_of(client: EngineClient) -> tuple[psutil.Process, psutil.Process]:
    """The processes of rank 0 and rank 1."""
    engine = psutil.Process(client.info.pid)
    (worker,) = [one for one in engine.children() if "ranks" in one.cmdline()[-1]]
    return engine, worker
