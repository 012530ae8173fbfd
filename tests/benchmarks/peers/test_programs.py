"""`benchmarks.programs`: both forms of a program ask for the same; what is reported."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

import rootlace as rl
from benchmarks.given import DATA
from benchmarks.peers.drive import PeerError
from benchmarks.programs import chat
from benchmarks.programs.client import Encoder, Prompt, Tokens
from benchmarks.programs.engines import Done, Ours, ideal_of
from benchmarks.programs.measure import Turn, measure
from benchmarks.programs.report import (
    CACHE_OFF,
    PEER,
    ROOTLACE,
    found_of,
    table_of_found,
    targets_of,
)
from benchmarks.programs.texts import made_up_texts, read_texts
from benchmarks.programs.vllm_client import VllmClient
from benchmarks.programs.vocabulary import with_vocabulary
from benchmarks.programs.workload import Row, Workload
from benchmarks.programs.workloads import WORKLOADS

TEXTS = made_up_texts()
CHATS = {workload.name for workload in chat.WORKLOADS}


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in CHATS])
def test_requests_are_those_of_the_program(name: str, runtime: rl.Runtime, models: Path) -> None:
    """The program's prompts have as many tokens as its requests to a server, and it finds as many
    of them as any cache could. Of a choice that is only scored, the last token is not computed."""
    workload, ours = WORKLOADS[name], Ours(ROOTLACE, runtime)
    rows = workload.draw(TEXTS, 1, 2)[:1]
    ours.flush()
    done = ours.run(workload, rows)
    ideal = ideal_of(workload, rows, Encoder(models / "a"))
    assert done.prompt == ideal.prompt_tokens
    spared = done.prompt - done.computed - ideal.cached_tokens
    assert 0 <= spared <= {"HellaSwag": 4}.get(name, 0)
    assert ideal.cached_tokens > 0 or name == "JSON decoding"


def test_a_chat_is_what_its_template_writes() -> None:
    """The benchmark's models have a template that the tests' tiny one has not."""

    class Echo:
        async def complete(self, prompt: Prompt, tokens: int) -> Tokens:
            asked.append("".join(part if isinstance(part, str) else "reply" for part in prompt))
            return [0] * tokens

    asked: list[str] = []
    turns = ["one", "two"]
    asyncio.run(chat.requests(Echo(), turns, 3))  # type: ignore[arg-type]
    template = json.loads((DATA / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": chat.SYSTEM}, {"role": "user", "content": "one"}]
    messages += [{"role": "assistant", "content": "reply"}, {"role": "user", "content": "two"}]
    render = jinja2.Template(template).render
    assert asked == [
        render(messages=messages[:2], add_generation_prompt=True),
        render(messages=messages, add_generation_prompt=True),
    ]


def test_texts_are_enough_for_every_workload(shared_dir: Path) -> None:
    for texts in (TEXTS, read_texts(shared_dir / "data")):
        for workload in WORKLOADS.values():
            rows = workload.draw(texts, 0, workload.batch + 4)
            assert len(rows) == workload.batch + 4
            # The same every time; others with another seed.
            if workload.name != "RAG":  # whose rows hold a database
                assert rows == workload.draw(texts, 0, workload.batch + 4)
                assert rows != workload.draw(texts, 1, workload.batch + 4)


def test_the_vocabulary(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 2000}))
    (model / "tokenizer.json").write_text("another")
    (model / "model.safetensors").write_bytes(b"weights")
    folder = with_vocabulary(model, TEXTS, tmp_path / "other")
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")
    encoder, text = Encoder(folder), TEXTS.sentences[0]
    assert encoder.size == 2000
    assert len(encoder.ids([text])) < len(text) / 2
    # Texts that follow each other are one text; what is written is read again.
    assert encoder.ids([text[:7], text[7:], [5], "a"]) == [
        *encoder.ids([text]),
        5,
        *encoder.ids(["a"]),
    ]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(encoder.ids(["Zürich, 24"])) == "Zürich, 24"


class _Still:
    """An engine that computes nothing: a program takes it as many seconds as it is told."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.did: list[int | str] = []

    def flush(self) -> None:
        self.did.append("flush")

    def awake(self) -> Any:
        return nullcontext()

    def run(self, workload: Workload, rows: Sequence[Row]) -> Done:
        self.did.append(len(rows))
        return Done(self.seconds * len(rows), 1000, 100, 50)


def test_engines_take_turns(models: Path) -> None:
    engines = [_Still(ROOTLACE, 1.0), _Still(PEER, 2.0), _Still(CACHE_OFF, 90.0)]
    workload = replace(WORKLOADS["skeleton of thought"], batch=3)
    encoder = Encoder(models / "a")
    turns = list(measure([workload], engines, TEXTS, encoder, 3, 1.0, 2, 900.0))
    # Another one first in each repetition; who is slow does it once.
    names = [[turn.engine for turn in turns if turn.repetition == n] for n in range(3)]
    assert names == [[ROOTLACE, PEER, CACHE_OFF], [PEER, ROOTLACE], [ROOTLACE, PEER]]
    assert len(list(measure([workload], engines, TEXTS, encoder, 3, 1.0, 2, 0.0))) == 3
    assert engines[0].did[:15] == ["flush", 3, "flush", 1, 1] * 3
    one = turns[0]
    assert (one.programs, one.wall_s, one.latency_s, one.computed_tokens) == (3, 3.0, 1.0, 100)


def test_what_is_found() -> None:
    one = Turn(ROOTLACE, "a", 0, 4, 2.0, 0.5, 1000, 200, 1010, 220, 50, 0.0)
    turns = [
        one,
        replace(one, repetition=1, wall_s=1.0, latency_s=0.25),
        replace(one, engine=PEER, wall_s=6.0, engine_prompt_tokens=900, computed_tokens=450),
        replace(one, engine=PEER, repetition=1, wall_s=5.0, computed_tokens=450),
        replace(one, workload="b"),
        replace(one, engine=PEER, workload="b", wall_s=1.0),
    ]
    found = found_of(turns)
    ours, peer = found["a"][ROOTLACE], found["a"][PEER]
    assert ours.throughput == pytest.approx((4 / 2 + 4 / 1) / 2) and ours.throughput_ratio == 1
    assert peer.throughput_ratio == pytest.approx((6 / 2 + 5 / 1) / 2)
    assert peer.latency_ratio == pytest.approx((1 + 2) / 2)
    assert (ours.hit_rate, ours.ideal_hit_rate) == pytest.approx((0.78, 0.8))
    assert peer.hit_rate == pytest.approx(1 - 900 / 1910)
    values = {what: (aim["value"], aim["met"]) for what, aim in targets_of(found).items()}
    assert list(values.values()) == [
        (pytest.approx((4 * 0.5) ** 0.5), False),
        (0.5, False),
        (pytest.approx(0.78 / 0.8), True),
    ]
    assert table_of_found(found).row_count == 2
    alone = targets_of({"a": {ROOTLACE: ours}})
    assert [aim["met"] for aim in alone.values()] == [None, None, True]


def test_the_client_of_vllm() -> None:
    """Against a server that answers in vLLM's fields."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        if body["max_tokens"] == 99:
            return web.json_response({"error": "too many"}, status=400)
        count = body["max_tokens"] - (body["max_tokens"] == 7)
        choice: dict[str, Any] = {"text": "B", "token_ids": [1] * count}
        if "prompt_logprobs" in body:
            known = [{str(token): {"logprob": -token / 300}} for token in body["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *known]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        details = {"prompt_tokens_details": {"cached_tokens": 2}}
        return web.json_response({"choices": [choice], "usage": usage | details})

    async def ask(encoder: Encoder) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server, ClientSession(server.make_url("/")) as session:
            client = VllmClient(session, "model", encoder)
            assert await client.complete(["abc", [9]], 3, regex="x") == [1, 1, 1]
            assert await client.choose(["abc"], ["A", "B"]) == 1
            assert (client.usage.prompt, client.usage.cached, client.usage.output) == (7, 4, 4)
            # The mean counts, not the sum; small ids are likelier here.
            assert await client.rank(["abc"], ["zz", '""""', "zzz"]) == 1
            with pytest.raises(PeerError, match=r"400: .*too many"):
                await client.complete(["a"], 99)
            with pytest.raises(PeerError, match="asked for 7 tokens, got 6"):
                await client.complete(["a"], 7)

    class Bytes(Encoder):
        def __init__(self) -> None:
            pass

        def _encode(self, text: str) -> Tokens:
            return list(text.encode())

    asyncio.run(ask(Bytes()))
    first, second = bodies[:2]
    assert first["prompt"] == [97, 98, 99, 9] and first["ignore_eos"] is True
    assert first["structured_outputs"] == {"regex": "x"} and first["temperature"] == 0
    assert second["structured_outputs"] == {"choice": ["A", "B"]} and second["max_tokens"] == 1
