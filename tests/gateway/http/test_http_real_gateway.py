"""HTTP over the real gateway: sessions, tokenizer, chat template; only the engine is fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.tree_page import TreeNode, TreePage
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.app import make_runner
from rootlace.runtime.gateway.keys.key_file import new_key, write_keys
from rootlace.runtime.gateway.spans import Spans
from rootlace.runtime.gateway.texts import load_chat, load_eos_ids
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.wire.errors import Overloaded
from rootlace.wire.handling import Cache, Handling
from tests.gateway.fake_engine import FakeEngine, made_up_vector
from tests.gateway.http.conftest import Serve, Served
from tests.scheduler.world import World
from tests.tiny_model import make_tiny_model
from tests.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("http") / "tiny"))


@pytest.fixture
def reference(folder: str) -> FastTokenizer:
    return FastTokenizer.from_file(f"{folder}/tokenizer.json")


@pytest.fixture
async def real(folder: str, serve: Serve, reference: FastTokenizer) -> Served:
    return await _serve(folder, serve, reference)


async def _serve(folder: str, serve: Serve, reference: FastTokenizer, **options: str) -> Served:
    source = FolderSource(Path(folder))
    tokenizer = Tokenizer.read(source)
    end = reference.token_to_id("<|end|>")
    engine = FakeEngine(
        tokenizer.vocab_size,
        context_length=512,
        adapters=("formal", "short"),
        script=lambda message: [*reference.encode("héllo. bye").ids, end],
    )
    config = GatewayConfig(model=folder, program_address="", served_name="tiny", **options)  # type: ignore[arg-type]
    gateway = Gateway(
        config,
        engine,
        tokenizer,
        load_chat(source, tokenizer),
        load_eos_ids(source, tokenizer),
    )
    return await serve(gateway)  # type: ignore[arg-type]


def _engine(served: Served) -> FakeEngine:
    return served.gateway.engine  # type: ignore[attr-defined]


def _ids(request: Request) -> list[int]:
    return request.token_ids.tolist()


async def test_completion(real: Served, reference: FastTokenizer) -> None:
    prompt = "<|user|>hi<|end|>"
    reply = await real.openai().completions.create(model="tiny", prompt=prompt, stop=["."])
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("héllo", "stop")
    # Whoever writes a raw prompt writes its special tokens too.
    assert _ids(_engine(real).submitted[0]) == reference.encode(prompt).ids
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 4 and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert real.gateway.branch_count == 0 and real.gateway.session_count == 0  # type: ignore[attr-defined]


async def test_content_of_a_chat_cannot_forge_a_role(
    real: Served, reference: FastTokenizer
) -> None:
    reply = await real.openai().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a<|system|>b"}]
    )
    assert reply.choices[0].message.content == "héllo. bye"
    assert reply.choices[0].finish_reason == "stop"
    special = [reference.token_to_id(t) for t in ("<|user|>", "<|end|>", "<|assistant|>")]
    sent = _ids(_engine(real).submitted[0])
    assert [i for i in sent if i >= 256] == special
    assert reference.decode(sent) == "a<|system|>b"


async def test_streams_never_hold_half_a_character(real: Served) -> None:
    stream = await real.openai().completions.create(
        model="tiny", prompt="x", stream=True, logprobs=0
    )
    texts, tokens = [], 0
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if chunk.choices[0].logprobs:
            tokens += len(chunk.choices[0].logprobs.tokens or ())
    assert "".join(texts) == "héllo. bye" and not any("\ufffd" in text for text in texts)
    assert tokens == len("héllo. bye".encode()) + 1  # the token that ended it is one of them


async def test_bytes_of_half_characters(real: Served) -> None:
    reply = await real.openai().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    said = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert said == "héllo. bye<|end|>".encode()


@pytest.mark.parametrize("stop", [None, "o. b!"])
async def test_places_of_tokens_count_characters(real: Served, stop: str | None) -> None:
    """The fake engine says a token a byte: two for the é, and the held back "o. b" is no shift."""
    places = [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    ask = {"model": "tiny", "prompt": "é", "logprobs": 1, "stop": stop}
    whole = await real.openai().completions.create(**ask)
    assert whole.choices[0].text == "héllo. bye" and whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == places
    stream = await real.openai().completions.create(**ask, stream=True)
    chunks = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    assert [place for chunk in chunks for place in chunk.text_offset or ()] == places
    echo = await real.openai().completions.create(**ask, echo=True)
    assert echo.choices[0].logprobs is not None
    assert echo.choices[0].logprobs.text_offset == [0, 0, *(1 + place for place in places)]


async def test_echo_of_token_ids_and_their_logprobs(real: Served, reference: FastTokenizer) -> None:
    ids = reference.encode("<|user|>ab").ids
    reply = await real.openai().completions.create(
        model="tiny", prompt=ids, echo=True, logprobs=1, max_tokens=1
    )
    choice = reply.choices[0]
    assert choice.text == "<|user|>abh" and choice.logprobs is not None
    assert choice.logprobs.tokens == ["<|user|>", "a", "b", "h"]
    assert choice.logprobs.text_offset == [0, 8, 9, 10]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None


async def test_native_logprobs_from_a_start(real: Served) -> None:
    body = {
        "text": "abcdef",
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 2,
        "return_text_in_logprobs": True,
    }
    async with real.http.post("/generate", json=body) as reply:
        meta = (await reply.json())["meta_info"]
    assert [text for _, _, text in meta["input_token_logprobs"]] == list("cdef")
    assert all(logprob < 0 for logprob, _, _ in meta["input_token_logprobs"])
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 0)
    beyond = {**body, "logprob_start_len": 7, "stream": True, "stream_options": {}}
    async with real.http.post("/generate", json=beyond) as reply:
        assert reply.status == 400 and "from token 7 on of a prompt of 6" in await reply.text()


async def test_abort(real: Served) -> None:
    engine = _engine(real)
    engine.paused = True
    body = {"text": "abcdef", "rid": "r", "stream": True, "sampling_params": {"stop": "zz"}}
    asked = asyncio.create_task(real.http.post("/generate", json=body))
    while not engine.running:
        await asyncio.sleep(0.001)
    for _ in range(3):
        engine.step()
    async with await asked as reply, real.http.post("/abort", json={"rid": "r"}) as aborted:
        assert (await aborted.json())["aborted"] == 1
        lines = (await reply.text()).split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert [event["meta_info"]["cached_tokens"] for event in events] == [3] * len(events)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-1]["text"] == events[-2]["text"]
    assert len(engine.aborted) == 1 and not engine.running


async def test_a_response_keeps_its_branch(real: Served, reference: FastTokenizer) -> None:
    """What goes on from it has its tokens as they were; they leave the cache last until then."""
    engine, gateway, client = _engine(real), real.gateway, real.openai()
    spoken = reference.encode("héllo").ids
    engine.script = lambda message: [*spoken, reference.token_to_id("<|end|>")]
    first = await client.responses.create(model="tiny", input="hi")
    prompt = _ids(engine.submitted[0])
    second = await client.responses.create(
        model="tiny", input="and?", previous_response_id=first.id
    )
    assert first.output_text == second.output_text == "héllo"
    assert _ids(engine.submitted[1])[: len(prompt) + len(spoken)] == prompt + spoken
    rest = _ids(engine.submitted[1])[len(prompt) + len(spoken) :]
    assert rest == reference.encode("<|end|><|user|>and?<|end|><|assistant|>").ids
    names = [request.program for request in engine.submitted]
    assert len(set(names)) == 2 and all(names)
    assert engine.released == [names[0]]  # the second is all of the first, and holds it
    await client.responses.delete(second.id)
    assert engine.released == names
    # What is not kept, or not shared, holds nothing.
    for more in ({"store": False}, {"cache": {"share": False}}):
        async with real.http.post("/v1/responses", json={"input": "hi", **more}) as reply:
            assert reply.status == 200
    assert not any(request.program for request in engine.submitted[2:])
    assert gateway.session_count == gateway.branch_count == 0  # type: ignore[attr-defined]


async def test_spans(real: Served) -> None:
    """Each generation is a span of the trace that its request names."""
    exporter = InMemorySpanExporter()
    real.gateway.spans = Spans(exporter)  # type: ignore[assignment]
    runner = make_runner(real.gateway)  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "r1"}
    asked = [{"role": "user", "content": "hi"}]
    for path, body, status in (
        ("/v1/chat/completions", {"messages": asked, "top_p": 0.5}, 200),
        ("/v1/completions", {"prompt": "x" * 600}, 400),
    ):
        async with real.http.post(url + path, json=body, headers=headers) as reply:
            assert reply.status == status
    await runner.cleanup()
    real.gateway.spans.flush()  # type: ignore[attr-defined]
    chat, failed = exporter.get_finished_spans()
    for span in (chat, failed):
        assert span.context is not None and span.parent is not None
        assert (span.context.trace_id, span.parent.span_id) == (int(trace, 16), int(parent, 16))
        assert span.attributes is not None and span.attributes["rootlace.request_id"] == "r1"
    assert (chat.name, failed.name) == ("chat tiny", "text_completion tiny")
    assert [event.name for event in chat.events][-2:] == ["first_token", "end"]
    found = chat.attributes or {}
    assert found["gen_ai.request.top_p"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == len(_engine(real).submitted[0].token_ids)
    assert found["gen_ai.usage.output_tokens"] == len("héllo. bye".encode()) + 1
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert not failed.status.is_ok and chat.status.is_unset
    assert failed.attributes and failed.attributes["error.type"] == "context_length_exceeded"


class TreeEngine(FakeEngine):
    """With a scheduler and its radix tree, of 256 tokens, whose model is made up."""

    world: World

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        scheduler, later = self.world.scheduler, asyncio.get_running_loop().call_soon
        scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.plan()
            assert plan is not None
            for update in scheduler.commit(plan, self.world.executor.run(plan)):
                later(on_update, update)

    def release_program(self, program: str, wanted: bool = False) -> None:
        self.world.scheduler.cache.release_program(program, wanted)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_response_outlives_pressure_on_the_cache(real: Served, kept: bool) -> None:
    """Prompts that fill the whole cache push out what nobody goes on from, and nothing else."""
    known = _engine(real)
    engine = TreeEngine(known.vocab_size, context_length=512, capacity_tokens=256)
    engine.world = World(num_blocks=64, vocab_size=known.vocab_size, context_length=512)
    real.gateway.engine = engine  # type: ignore[attr-defined]
    real.gateway.model_info = msgspec.structs.replace(real.gateway.model_info, capacity_tokens=256)
    client = real.openai()
    ask: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8}
    first = await client.responses.create(input="a story, please", **ask)
    if not kept:
        await client.responses.delete(first.id)
    for row in range(9):
        body = {"input_ids": [row] * 60, "sampling_params": {"max_new_tokens": 0}}
        async with real.http.post("/generate", json=body) as reply:
            assert reply.status == 200
    more = {"previous_response_id": first.id} if kept else {}
    second = await client.responses.create(input="a story, please", **more, **ask)  # type: ignore[call-overload]
    assert first.usage is not None and engine.world.scheduler.stats()["evicted_blocks"] > 0
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached == (first.usage.total_tokens - 1 if kept else 0)


def _refuse(*given: Any, **more: Any) -> Any:
    raise Overloaded("of the test")


async def test_a_session_goes_on_from_its_requests(real: Served) -> None:
    engine, gateway = _engine(real), real.gateway
    engine.script = lambda message: [7, 8, 9]

    async def post(path: str, status: int = 200, **body: Any) -> Any:
        async with real.http.post(path, json=body) as reply:
            said = await reply.json()
            assert reply.status == status, said
            return said if status == 200 else said["error"]["param"]

    async def ask(ids: list[int], status: int = 200, **params: Any) -> Any:
        """The new request's id; what the engine got is `_ids(engine.submitted[-1])`."""
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
        assert _ids(engine.submitted[-1]) == expected
    # What went on from the first request was replaced by the last one.
    assert await ask([4], 400, rid=second) == "session_params.rid"
    assert await ask([4], 400, rid="none") == "session_params.rid"
    programs = [request.program for request in engine.submitted]
    assert len(set(programs)) == len(programs) and all(programs)
    assert set(programs) - set(engine.released) == {programs[-2], programs[-1]}
    await ask([5], replace=True)
    assert await ask([4], 400, rid=last) == "session_params.rid"
    # Nobody waits for what is replaced while it runs.
    engine.paused = True
    running = asyncio.create_task(ask([6]))
    await until(lambda: bool(engine.running))
    replaced = asyncio.create_task(ask([6], replace=True))
    await running
    engine.pause(False)
    await replaced
    assert len(engine.aborted) == 1
    # Nothing stays of a request that could not be started.
    body = {"input_ids": [6], "rid": "r", "session_params": {"id": name}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "open_session", _refuse)
        await post("/generate", 429, **body)
    await post("/generate", **body)
    await post("/close_session", session_id=name)
    assert await post("/close_session", 400, session_id=name) == "session_id"
    assert await ask([1], 400) == "session_params.id"
    assert len(engine.released) == len(engine.submitted)
    assert gateway.session_count == gateway.branch_count == 0  # type: ignore[attr-defined]


async def test_tenants_are_separate(real: Served) -> None:
    for path, body in (
        ("/generate", {"text": "x", "extra_key": "t"}),
        ("/v1/completions", {"prompt": "x", "cache_salt": "t"}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        async with real.http.post(path, json=body) as reply:
            assert reply.status == 200
    assert [submit.namespace for submit in _engine(real).submitted] == ["t", "t", ""]


@pytest.mark.parametrize(
    "path, body, status, code",
    [
        ("/generate", {"text": "x" * 600}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": ["x", "y" * 600]}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": ""}, 400, "invalid_request"),
        ("/v1/completions", {"prompt": "x" * 600, "stream": True}, 400, "context_length_exceeded"),
    ],
)
async def test_refusals(
    real: Served, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    async with real.http.post(path, json=body) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (status, code)
    assert not _engine(real).running


async def test_an_overloaded_engine(real: Served) -> None:
    _engine(real).script = lambda message: Overloaded("the queue is full")
    async with real.http.post("/generate", json={"text": "x"}) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (429, "1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_the_engine_requests(real: Served, stream: bool) -> None:
    engine = _engine(real)
    engine.paused = True
    async with aiohttp.ClientSession(real.url) as client:
        body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(engine.running) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: not engine.running)
    assert len(engine.aborted) == 4
    assert real.gateway.branch_count == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_how_embeddings_are_served(real: Served, path: str) -> None:
    engine, body = _engine(real), {"model": "tiny", "input": "a"}

    async def ask(**more: Any) -> tuple[int, str]:
        async with real.http.post(path, json={**body, **more}) as reply:
            return reply.status, await reply.text()

    assert (await ask(priority=3, cache={"ttl": 9}))[0] == 200
    assert engine.submitted[-1].handling == Handling(3, cache=Cache(ttl=9))
    assert (await ask(cache={"share": False}))[0] == 200
    assert engine.forgotten == [engine.submitted[-1].namespace]
    status, said = await ask(cache={"pin": True})
    assert status == 400 and "cache.pin" in said
    engine.paused = True
    status, said = await ask(timeout=0.01)
    assert status == 408 and "0.01 s" in said and not engine.running


async def test_tokenize(real: Served, reference: FastTokenizer) -> None:
    async with real.http.post("/tokenize", json={"prompt": "<|user|>é"}) as reply:
        assert (await reply.json())["tokens"] == reference.encode("<|user|>é").ids
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with real.http.post("/tokenize", json=chat) as reply:
        found = await reply.json()
    assert found["tokens"] == reference.encode("<|user|>hi<|end|><|assistant|>").ids
    async with real.http.post("/detokenize", json={"tokens": found["tokens"]}) as reply:
        assert await reply.json() == {"prompt": "<|user|>hi<|end|><|assistant|>"}


async def test_a_native_stream_refuses_a_prompt_too_long_without_tokenizing_it(
    real: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("tokenized")

    for name in ("encode", "encode_pieces", "settle"):
        monkeypatch.setattr(real.gateway.tokenizer, name, never)
    body = {"text": "long " * 100_000, "stream": True}
    async with real.http.post("/generate", json=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["code"] == "context_length_exceeded"


async def test_embeddings(real: Served, reference: FastTokenizer) -> None:
    client = real.openai()
    texts = ["héllo", "good <|end|>"]
    ids = [tuple(reference.encode(text).ids) for text in texts]
    wanted = [made_up_vector(one, "last") for one in ids]
    # The client asks for base64, and decodes it.
    reply = await client.embeddings.create(model="tiny", input=texts)
    for item, vector in zip(reply.data, wanted, strict=True):
        assert np.allclose(item.embedding, vector / np.linalg.norm(vector))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    of_ids = {"input": list(ids[0]), "pooling": "mean", "normalize": False, "dimensions": 2}
    async with real.http.post("/v1/embeddings", json=of_ids) as response:
        (item,) = (await response.json())["data"]
    assert np.allclose(item["embedding"], made_up_vector(ids[0], "mean")[:2])
    real.gateway.own_pooling = "mean"  # type: ignore[attr-defined]
    (item,) = (await client.embeddings.create(model="tiny", input=[*ids[:1]])).data
    wanted[0] = made_up_vector(ids[0], "mean")
    assert np.allclose(item.embedding, wanted[0] / np.linalg.norm(wanted[0]))
    real.gateway.own_pooling = "cls_token"  # type: ignore[attr-defined]
    async with real.http.post("/v1/embeddings", json={"input": "a"}) as response:
        assert (
            response.status == 400 and "(cls_token)" in (await response.json())["error"]["message"]
        )
    real.gateway.own_pooling = "last"  # type: ignore[attr-defined]
    for wrong, param in (({"dimensions": 4}, "dimensions"), ({"input": []}, "input")):
        async with real.http.post("/v1/embeddings", json={"input": "a"} | wrong) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
    for given, words, param in (
        ([4] * 600, "context", "input"),
        ("", "empty", "input"),
        (["a", "b " * 600], "input[1]: the prompt of", "input[1]"),
        (["a", ""], "input[1]: it is empty", "input[1]"),
    ):
        async with real.http.post("/v1/embeddings", json={"input": given}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert words in error["message"] and error["param"] == param


async def test_adapters(real: Served) -> None:
    engine = _engine(real)
    client = real.openai()
    names = [model.id async for model in client.models.list()]
    assert names == ["tiny", "tiny:formal", "tiny:short"]
    reply = await client.completions.create(model="tiny:formal", prompt="a")
    assert reply.model == "tiny:formal"
    messages: Any = [{"role": "user", "content": "a"}]
    extra = {"adapter": "short"}
    await client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
    await client.embeddings.create(model="tiny:short", input="a")
    body = {"text": ["a", "b"], "lora_path": [None, "formal"]}
    async with real.http.post("/generate", json=body) as response:
        assert response.status == 200
    found = [request.adapter for request in engine.submitted]
    assert found == ["formal", "short", "short", "", "formal"]
    for model, adapter, status, param in (
        ("tiny:loud", None, 404, "model"),
        ("tiny", "loud", 400, "adapter"),
        ("tiny:short", "formal", 400, "adapter"),
        ("tiny:short", "", 400, "adapter"),
        ("tiny", "", 200, None),
    ):
        body = {"model": model, "prompt": "a", "adapter": adapter}
        async with real.http.post("/v1/completions", json=body) as response:
            assert response.status == status
            if param is not None:
                assert (await response.json())["error"]["param"] == param
    assert engine.submitted[-1].adapter == ""


async def test_to_explain_the_cache_is_no_request_of_a_quota(
    folder: str, serve: Serve, reference: FastTokenizer, tmp_path: Path
) -> None:
    path = str(tmp_path / "keys.json")
    key, entry = new_key("a", requests_per_minute=1)
    write_keys(path, [entry])
    served = await _serve(folder, serve, reference, keys_file=path)
    headers = {"Authorization": f"Bearer {key}"}
    found = []
    for where in ("/cache/explain", "/cache/explain", "/select", "/select"):
        body = {"prompt": "a"} if "explain" in where else {"text": "a", "choices": ["b"]}
        async with served.http.post(where, json=body, headers=headers) as reply:
            found.append(reply.status)
    assert found == [200, 200, 200, 429]


async def test_each_key_has_a_namespace_and_pays_for_its_tokens(
    folder: str, serve: Serve, reference: FastTokenizer, tmp_path: Path
) -> None:
    path = str(tmp_path / "keys.json")
    made = [new_key(name) for name in "ab"]
    made.append(new_key("c", namespace="shared", tokens_per_minute=1))
    made[1] = new_key("b", max_priority=3, max_pins=2)
    write_keys(path, [entry for _, entry in made])
    served = await _serve(folder, serve, reference, keys_file=path, api_key="operator")
    engine = _engine(served)

    async def ask(key: str, method: str, where: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"x-api-key": key}
        async with served.http.request(method, where, json=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None) if reply.status < 500 else ""

    a, b, c = (key for key, _ in made)
    used = []
    for key in (a, b, c, "operator"):
        for salt in ("", "@a/"):
            body = {"prompt": "hi", "max_tokens": 3, "cache_salt": salt}
            status, _ = await ask(key, "POST", "/v1/completions", body)
            # The one token of c's is spent with the first request.
            assert status == (429 if (key, salt) == (c, "@a/") else 200)
        used += [request.namespace for request in engine.submitted[len(used) :]]
    assert used == ["@a/", "@a/@a/", "@b/", "@b/@a/", "", "", "@a/"]
    # Whose turn it is among those who wait.
    assert [request.max_pins for request in engine.submitted[1:3]] == [None, 2]
    turns = [request.client for request in engine.submitted]
    assert turns == [*("key a",) * 2, *("key b",) * 2, "key c", *("127.0.0.1",) * 2]
    for kind, asked in (("completions", {"prompt": "hi"}), ("embeddings", {"input": "hi"})):
        for priority, expected in ((3, 200), (4, 400)):
            body = {**asked, "priority": priority}
            status, reply = await ask(b, "POST", f"/v1/{kind}", body)
            assert status == expected
        assert "3 at most (max_priority)" in reply["error"]["message"]
    status, _ = await ask(a, "POST", "/cache/explain", {"prompt": "hi"})
    assert status == 200 and [(one[1], one[2]) for one in engine.explained] == [("@a/", "own")]
    await ask(b, "POST", "/v1/embeddings", {"input": "hi", "cache_salt": "s"})
    assert engine.submitted[-1].namespace == "@b/s"
    for method, path in (("POST", "/flush_cache"), ("GET", "/metrics")):
        assert (await ask(a, method, path))[0] == 403
    assert not engine.flushes
    async with served.http.get("/metrics", headers={"x-api-key": "operator"}) as reply:
        text = await reply.text()
    prompt = len(reference.encode("hi").ids)
    assert f'rootlace_key_usage_total{{key="a",kind="prompt_tokens"}} {2 * prompt}.0' in text
    assert 'rootlace_key_usage_total{key="a",kind="completion_tokens"} 6.0' in text
    assert 'rootlace_key_usage_total{key="c",kind="refused"} 1.0' in text


async def test_marks_of_the_cache_do_not_count_the_prompt_again(
    folder: str, serve: Serve, reference: FastTokenizer, tmp_path: Path
) -> None:
    path = str(tmp_path / "keys.json")
    key, entry = new_key("a")
    write_keys(path, [entry])
    served = await _serve(folder, serve, reference, keys_file=path, api_key="operator")
    mark = {"cache_control": {"type": "ephemeral"}}
    text = [{"type": "text", "text": text, **mark} for text in ("one and", " two and")]
    body = {
        "model": "tiny",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": [*text, {"type": "text", "text": " three"}]}],
    }
    headers = {"x-api-key": key}
    async with served.http.post("/v1/messages", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
    asked = [len(request.token_ids) for request in _engine(served).submitted]
    assert len(asked) == 3
    async with served.http.get("/metrics", headers={"x-api-key": "operator"}) as reply:
        counted = await reply.text()
    assert f'rootlace_key_usage_total{{key="a",kind="prompt_tokens"}} {asked[-1]}.0' in counted


async def test_a_key_sees_its_own_part_of_the_tree(
    folder: str, serve: Serve, reference: FastTokenizer, tmp_path: Path
) -> None:
    path = str(tmp_path / "keys.json")
    key, entry = new_key("a")
    write_keys(path, [entry])
    served = await _serve(folder, serve, reference, keys_file=path, cache_reports="all")
    asked: list[str | None] = []

    async def ask(kind: type, namespace: str | None, under: int, limit: int) -> TreePage:
        asked.append(namespace)
        return TreePage((TreeNode(1, 0, namespace or "", "", 0, 1, (5,)),))

    _engine(served).ask = ask  # type: ignore[method-assign]
    for query, shown in (("", ""), ("?namespace=s", "s"), ("?namespace=@b/", "@b/")):
        headers = {"Authorization": f"Bearer {key}"}
        async with served.http.get(f"/cache/tree{query}", headers=headers) as reply:
            (node,) = (await reply.json())["nodes"]
        assert asked[-1] == f"@a/{shown}" and node["namespace"] == shown


async def test_a_pause(real: Served) -> None:
    for path, status, paused in (
        ("/pause_generation", "paused", True),
        ("/continue_generation", "ok", False),
    ):
        async with real.http.post(path, json={"mode": "in_place"}) as reply:
            assert await reply.json() == {"status": status}
        assert _engine(real).paused is paused
