"""`--warm-up`: a model generates before the server reports that it is ready."""

import asyncio
import logging
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rootlace.runtime.config import EngineConfig, GatewayConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.server.http.app import make_runner
from rootlace.runtime.server.open_model import close_model, open_model
from rootlace.runtime.server.served_model import ServedModel
from rootlace.wire.errors import InvalidConstraint, Overloaded
from tests.server.conftest import folder_of, load
from tests.server.fake_engine import FakeEngine


def opened(
    engine: FakeEngine, warm_up: bool = True, replicas: int = 1
) -> asyncio.Task[ServedModel]:
    async def start() -> Any:
        return engine

    model = str(folder_of("stories3M"))
    config = GatewayConfig(model=model, program_address="", warm_up=warm_up, replicas=replicas)
    opening = open_model(config, EngineConfig(), lambda _: None, start=start)
    return asyncio.create_task(opening)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(load("stories3M").vocab_size)


async def test_a_model_is_open_once_it_has_generated(engine: FakeEngine) -> None:
    engine.paused = True
    opening = opened(engine)
    while len(engine.submitted) < 1:
        await asyncio.sleep(0)
    engine.step()
    await asyncio.sleep(0)
    assert not opening.done()  # seven more tokens, and the constrained text, are awaited
    engine.pause(False)
    model = await opening
    free, constrained = engine.submitted
    assert free.constraint is None and constrained.constraint is not None
    assert constrained.constraint.kind == "json_schema"
    runner = make_runner(model)
    async with TestClient(TestServer(runner.app)) as client:
        assert (await client.get("/ready")).status == 200
    assert len(engine.submitted) == 2, "that it is ready had to be found out"
    assert model.session_count == 0
    await close_model(model)


async def test_nothing_is_generated_where_nobody_asked_for_it(engine: FakeEngine) -> None:
    model = await opened(engine, warm_up=False)
    assert not engine.submitted
    await close_model(model)


async def test_a_model_that_cannot_generate_is_not_opened(engine: FakeEngine) -> None:
    engine.script = lambda request: Overloaded("no room")
    stopped: list[bool] = []
    stop = engine.stop

    async def note() -> None:
        stopped.append(True)
        await stop()

    engine.stop = note  # type: ignore[method-assign]
    with pytest.raises(Overloaded, match="no room"):
        await opened(engine)
    assert stopped


async def test_a_model_without_constraints_is_opened(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: EngineRequest) -> list[int] | Exception:
        return [7] * 8 if request.constraint is None else InvalidConstraint("no vocabulary")

    engine.script = script
    with caplog.at_level(logging.WARNING):
        model = await opened(engine)
    assert "cannot be constrained: " in caplog.text and "no vocabulary" in caplog.text
    await close_model(model)


async def test_each_replica_has_something_to_do(engine: FakeEngine) -> None:
    model = await opened(engine, replicas=3)
    prompts = [request.token_ids.tolist() for request in engine.submitted]
    assert prompts == [[0], [1], [2]] * 2, "equal prompts would all go to one"
    await close_model(model)
