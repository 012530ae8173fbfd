"""Bodies of many prompts and samples: bounds on their number, and turns for other clients."""

import asyncio

import pytest

from rootlace.runtime.server.http import generation
from rootlace.wire.protocol import Open, SamplingParams, Text
from tests.server.http.conftest import Served
from tests.server.http.fake_model import FakeModel, stand_in


async def test_samples_of_all_prompts_are_bounded(served: Served) -> None:
    for path, body, field in (
        ("/v1/completions", {"prompt": ["x"] * 2049, "n": 2}, "n"),
        ("/generate", {"text": ["x"] * 2049, "sampling_params": {"n": 2}}, "sampling_params"),
    ):
        async with served.http.post(path, json=body) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["param"]) == (400, field)
            assert "at most 4096 samples of all prompts together, not 4098" in error["message"]
    assert not served.model.sessions


async def test_many_prompts_begin_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    model = FakeModel()
    model.script = lambda prompt, index: prompt
    job = generation.GenerateRequest(
        (Text("x"),), SamplingParams(n=generation.SAMPLES_AT_ONCE // 2)
    )

    def begun() -> int:
        return sum(isinstance(op, Open) for op in model.sessions[-1].ops)

    with generation.GenerationStream(model, [job] * 8) as shots:  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert begun() == 2
        await asyncio.sleep(0)
        assert begun() == 4
        shots.abort(7)  # before it has begun
        results = await shots.results()
        assert begun() == 7
    assert [[output.text for output in one.outputs] for one in results] == [
        *[["x"] * job.params.n] * 7,
        [""] * job.params.n,
    ]
    with generation.GenerationStream(model, [job] * 8):  # type: ignore[arg-type]
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun() == 2
