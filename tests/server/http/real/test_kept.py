"""Responses and sessions over the real gateway: tokens and texts kept between requests."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.server.http import generation
from rootlace.wire.errors import Overloaded
from tests.scheduler.world import World
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import Served
from tests.server.http.real.served import engine_of, ids_of
from tests.waiting import until


async def test_a_response_keeps_its_branch(real: Served, reference: FastTokenizer) -> None:
    """A later response continues with the same tokens, which the cache evicts last until then."""
    engine, model, client = engine_of(real), real.model, real.openai()
    spoken = reference.encode("héllo").ids
    engine.script = lambda message: [*spoken, reference.token_to_id("<|end|>")]
    first = await client.responses.create(model="tiny", input="hi")
    prompt = ids_of(engine.submitted[0])
    second = await client.responses.create(
        model="tiny", input="and?", previous_response_id=first.id
    )
    assert first.output_text == second.output_text == "héllo"
    assert ids_of(engine.submitted[1])[: len(prompt) + len(spoken)] == prompt + spoken
    rest = ids_of(engine.submitted[1])[len(prompt) + len(spoken) :]
    assert rest == reference.encode("<|end|><|user|>and?<|end|><|assistant|>").ids
    names = [request.program for request in engine.submitted]
    assert len(set(names)) == 2 and all(names)
    assert engine.released == [names[0]]  # the second continues the first, so it pins both
    await client.responses.delete(second.id)
    assert engine.released == names
    # Responses that are not kept, or not shared, pin nothing.
    for more in ({"store": False}, {"cache": {"share": False}}):
        assert (await real.post("/v1/responses", {"input": "hi", **more})).status == 200
    assert not any(request.program for request in engine.submitted[2:])
    assert model.session_count == model.branch_count == 0  # type: ignore[attr-defined]


class TreeEngine(FakeEngine):
    """An engine with a scheduler and a radix tree of 256 tokens; the model's tokens are made up."""

    world: World

    def submit(self, request: EngineRequest, on_update: Callable[[EngineOutput], None]) -> None:
        scheduler, later = self.world.scheduler, asyncio.get_running_loop().call_soon
        scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.plan()
            assert plan is not None
            for update in scheduler.commit(plan, self.world.executor.run(plan)):
                later(on_update, update)

    def release_program(self, program: str, wanted: bool = False) -> None:
        self.world.scheduler.cache.release_program(program, wanted)


def _refuse(*given: Any, **more: Any) -> Any:
    raise Overloaded("of the test")


@pytest.mark.parametrize("kept", [True, False])
async def test_a_response_outlives_pressure_on_the_cache(real: Served, kept: bool) -> None:
    """Prompts that fill the cache evict only branches that no response continues."""
    known = engine_of(real)
    engine = TreeEngine(known.vocab_size, context_length=512, capacity_tokens=256)
    engine.world = World(num_blocks=64, vocab_size=known.vocab_size, context_length=512)
    real.model.engine = engine  # type: ignore[attr-defined]
    real.model.model_info = msgspec.structs.replace(real.model.model_info, capacity_tokens=256)
    client = real.openai()
    ask: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8}
    first = await client.responses.create(input="a story, please", **ask)
    if not kept:
        await client.responses.delete(first.id)
    for row in range(9):
        body = {"input_ids": [row] * 60, "sampling_params": {"max_new_tokens": 0}}
        assert (await real.post("/generate", body)).status == 200
    more = {"previous_response_id": first.id} if kept else {}
    second = await client.responses.create(input="a story, please", **more, **ask)  # type: ignore[call-overload]
    assert first.usage is not None and engine.world.scheduler.stats()["evicted_blocks"] > 0
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached == (first.usage.total_tokens - 1 if kept else 0)


async def test_a_session_goes_on_from_its_requests(real: Served) -> None:
    engine, model = engine_of(real), real.model
    engine.script = lambda message: [7, 8, 9]

    async def post(path: str, status: int = 200, **body: Any) -> Any:
        async with real.http.post(path, json=body) as reply:
            said = await reply.json()
            assert reply.status == status, said
            return said if status == 200 else said["error"]["param"]

    async def ask(ids: list[int], status: int = 200, **params: Any) -> Any:
        """Return the new request's id; `ids_of(engine.submitted[-1])` is the engine's prompt."""
        session = {"id": name, **params}
        said = await post("/generate", status, input_ids=ids, session_params=session)
        return said["meta_info"]["id"] if status == 200 else said

    name = await post("/open_session", capacity_of_str_len=100)
    assert await post("/open_session", 400, session_id=name) == "session_id"
    first = await ask([1, 2])
    second = await ask([3], rid=first)
    for params, expected in (
        ({"rid": second}, [1, 2, 7, 8, 9, 3, 7, 8, 9, 4]),
        ({"rid": second, "offset": -1}, [1, 2, 7, 8, 9, 3, 7, 8, 4]),
        ({"rid": second, "offset": 3}, [1, 2, 7, 4]),
        ({"rid": second, "drop_previous_output": True}, [1, 2, 7, 8, 9, 3, 4]),
        ({}, [4]),
        ({"rid": first, "replace": True}, [1, 2, 7, 8, 9, 4]),
    ):
        last = await ask([4], **params)
        assert ids_of(engine.submitted[-1]) == expected
    # The last request replaced the continuation of the first one.
    assert await ask([4], 400, rid=second) == "session_params.rid"
    assert await ask([4], 400, rid="none") == "session_params.rid"
    programs = [request.program for request in engine.submitted]
    assert len(set(programs)) == len(programs) and all(programs)
    assert set(programs) - set(engine.released) == {programs[-2], programs[-1]}
    await ask([5], replace=True)
    assert await ask([4], 400, rid=last) == "session_params.rid"
    # A request that replaces a running one does not wait for it.
    engine.paused = True
    running = asyncio.create_task(ask([6]))
    await until(lambda: bool(engine.running))
    replaced = asyncio.create_task(ask([6], replace=True))
    await running
    engine.pause(False)
    await replaced
    assert len(engine.aborted) == 1
    # A request that could not be started leaves nothing behind.
    body = {"input_ids": [6], "rid": "r", "session_params": {"id": name}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "OpenSequences", _refuse)
        await post("/generate", 429, **body)
    await post("/generate", **body)
    await post("/close_session", session_id=name)
    assert await post("/close_session", 400, session_id=name) == "session_id"
    assert await ask([1], 400) == "session_params.id"
    assert len(engine.released) == len(engine.submitted)
    assert model.session_count == model.branch_count == 0  # type: ignore[attr-defined]


async def test_a_session_of_one_line(real: Served) -> None:
    """`streaming`: each request continues the last request that was not aborted."""
    engine = engine_of(real)
    engine.script = lambda message: [7, 8, 9]

    async def post(path: str, **body: Any) -> Any:
        return (await real.post(path, body)).json()

    name = await post("/open_session", capacity_of_str_len=100, streaming=True)

    async def ask(ids: list[int], **params: Any) -> Any:
        return await post("/generate", input_ids=ids, session_params={"id": name, **params})

    for ids, params, expected in (
        ([1, 2], {}, [1, 2]),
        ([3], {"rid": None}, [1, 2, 7, 8, 9, 3]),
        ([4], {"rid": "any"}, [1, 2, 7, 8, 9, 3, 7, 8, 9, 4]),
    ):
        assert "text" in await ask(ids, **params)
        assert ids_of(engine.submitted[-1]) == expected
    for wrong in ({"offset": 1}, {"replace": True}, {"drop_previous_output": True}):
        assert (await ask([5], **wrong))["error"]["param"] == f"session_params.{next(iter(wrong))}"
    engine.paused = True
    running = asyncio.create_task(ask([6]))
    await until(lambda: bool(engine.running))
    assert "has not ended" in (await ask([5]))["error"]["message"]
    await post("/abort_request", abort_all=True)
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    engine.pause(False)
    await ask([5])
    assert ids_of(engine.submitted[-1]) == [*expected, 7, 8, 9, 5]
    programs = [request.program for request in engine.submitted]
    assert set(programs) - set(engine.released) == {programs[-1]}


async def test_what_is_held_goes_with_its_model(real: Served) -> None:
    assert (await real.post("/v1/responses", {"input": "a"})).status == 200
    model: Any = real.model
    assert model.branch_count == 1
    model.close()
    assert model.session_count == model.branch_count == 0 and engine_of(real).released


async def test_the_oldest_turns_go_where_the_context_is_full(real: Served) -> None:
    """`truncation: auto` drops as few turns as it must; system message and last turn stay."""
    engine = engine_of(real)
    system = {"role": "system", "content": "be brief"}
    turns = [
        {"role": role, "content": f"{number} {word} " + "x " * 20}
        for number in range(12)
        for role, word in (("user", "asked"), ("assistant", "said"))
    ]
    last = {"role": "user", "content": "and now?"}

    async def ask(given: list[Any], **more: Any) -> tuple[int, Any]:
        body = {"input": given, "store": False, "max_output_tokens": 100, **more}
        async with real.http.post("/v1/responses", json=body) as reply:
            return reply.status, await reply.json()

    status, said = await ask([system, *turns, last])
    assert status == 400 and said["error"]["code"] == "context_length_exceeded"
    status, said = await ask([system, *turns, last], truncation="auto")
    assert status == 200 and said["truncation"] == "auto"
    short = ids_of(engine.submitted[-1])
    lengths = []
    for dropped in range(12):
        if (await ask([system, *turns[2 * dropped :], last]))[0] == 200:
            lengths.append(len(ids_of(engine.submitted[-1])))
            if ids_of(engine.submitted[-1]) == short:
                break
    else:
        pytest.fail("what was left is no end of the conversation")
    assert lengths[-1] + 100 <= 512 and all(length + 100 > 512 for length in lengths[:-1])
    # A conversation that fits stays whole; one that cannot fit is an error.
    assert (await ask([system, last], truncation="auto"))[0] == 200
    whole = ids_of(engine.submitted[-1])
    assert (await ask([system, last]))[0] == 200 and ids_of(engine.submitted[-1]) == whole
    huge = {"role": "user", "content": "x " * 600}
    status, said = await ask([system, *turns, huge], truncation="auto")
    assert status == 400 and said["error"]["code"] == "context_length_exceeded"
    assert (await ask([last], truncation="last"))[0] == 400
