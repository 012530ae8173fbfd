"""Scores of labels and ranks of texts, over a gateway that prefers texts the prompt repeats."""

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest

from rootlace.runtime.server.http import scoring
from rootlace.wire.errors import ContextLengthExceeded, InvalidRequest
from rootlace.wire.protocol import (
    Append,
    Event,
    Generate,
    Open,
    Select,
    Tokens,
)
from tests.server.http.conftest import Served
from tests.server.http.fake_model import FakeSession
from tests.waiting import until


async def post(served: Served, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with served.http.post(path, json=body) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def test_labels(served: Served) -> None:
    body = {"query": "ab", "items": ["a", "ba"], "labels": ["a", "b"], "cache_salt": "t"}
    reply = await post(served, "/v1/score", body)
    # "aba" and "abba" behind a BOS.
    expected = [[math.exp(-7), math.exp(-8)], [math.exp(-7), math.exp(-7)]]
    assert reply["scores"] == [pytest.approx(one) for one in expected]
    assert reply["usage"]["prompt_tokens"] == len("aba") + len("abba") + 2
    assert [op.namespace for op in served.model.sessions[-1].ops if isinstance(op, Open)] == [
        "t",
        "t",
    ]
    reply = await post(served, "/v1/score", {**body, "apply_softmax": True, "item_first": True})
    assert reply["scores"][1] == [0.5, 0.5]
    assert sum(reply["scores"][0]) == pytest.approx(1)
    ops = served.model.sessions[-1].ops
    texts = ["".join(part.text for part in op.parts) for op in ops if isinstance(op, Append)]  # type: ignore[union-attr]
    assert texts == ["aab", "baab"]
    assert served.model.sessions[-1].closed


async def test_labels_that_are_tokens(served: Served) -> None:
    body = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [7, 8]}
    reply = await post(served, "/v1/score", body)
    assert reply["scores"] == [[pytest.approx(math.exp(-0.5))] * 2] * 2
    appended = [op.parts for op in served.model.sessions[-1].ops if hasattr(op, "parts")]
    assert appended == [
        (Tokens(ids),) for ids in ((1, 2, 3, 7), (1, 2, 3, 8), (1, 2, 4, 5, 7), (1, 2, 4, 5, 8))
    ]
    assert served.model.last_generate.params.max_tokens == 0


async def test_relevance(served: Served) -> None:
    documents = ["no", "yes yes", {"text": "yes"}, "no no"]
    body = {"query": "q", "documents": documents, "top_n": 3, "method": "judge"}
    reply = await post(served, "/v1/rerank", body)
    assert [result["index"] for result in reply["results"]] == [1, 2, 0]
    assert reply["results"][1]["document"] == {"text": "yes"}
    assert all(0 < result["relevance_score"] < 1 for result in reply["results"])
    asked = served.model.chat.last["messages"][-1]["content"]
    assert "<Query>: q" in asked and "<Document>: no no" in asked
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    pairs = await post(served, "/v1/score", {"text_1": "q", "text_2": texts, "method": "judge"})
    scores = [one["score"] for one in pairs["data"]]
    for result in reply["results"]:
        assert result["relevance_score"] == scores[result["index"]]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/score", {"query": "a", "items": ["b"]}, "labels"),
        ("/v1/score", {"query": "a", "labels": ["b"]}, "query"),
        ("/v1/score", {"query": "a", "items": [[1]], "labels": ["b"]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [9999]}, "label_token_ids"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"query": "a", "items": ["b"], "labels": ["x", ""]}, "labels[1]"),
        ("/select", {"text": "a", "choices": ["b", ""]}, "choices[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
async def test_refusals(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    reply = await post(served, path, body, 400)
    assert reply["error"]["param"] == param
    assert not served.model.sessions


async def test_the_header_says_what_was_cached(served: Served) -> None:
    pair = {"query": "a", "items": ["b"]}
    for path, body in (
        ("/v1/score", {**pair, "labels": ["c"]}),
        ("/v1/score", {**pair, "label_token_ids": [7]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "method": "judge"}),
        ("/select", {"text": "a", "choices": ["b", "c"]}),
    ):
        async with served.http.post(path, json=body) as reply:
            assert reply.status == 200
            told = json.loads(reply.headers["x-rootlace-cache"])
        assert told["prompt"] > 0 and told["cached"] >= 0


async def test_a_document_that_does_not_fit_is_named(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's error about one prompt names no field."""
    perform = FakeSession.perform

    async def failing(session: FakeSession, op: Any, ids: list[int], emit: Any) -> Event:
        if isinstance(op, Select) and len(session.ops) > 3:
            raise ContextLengthExceeded("it does not fit")
        return await perform(session, op, ids, emit)

    monkeypatch.setattr(FakeSession, "perform", failing)
    for path, body, param in (
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "method": "judge"}, "documents[1]"),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "labels": ["d"]}, "items[1]"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "method": "judge"}, "text_2[1]"),
    ):
        reply = await post(served, path, body, 400)
        assert reply["error"]["param"] == param


async def test_a_choice_that_adds_no_token_is_named(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = FakeSession.perform

    async def failing(session: FakeSession, op: Any, ids: list[int], emit: Any) -> Event:
        if isinstance(op, Select):
            raise InvalidRequest("select: choice 1 ('d') adds no token", "choices[1]")
        return await perform(session, op, ids, emit)

    monkeypatch.setattr(FakeSession, "perform", failing)
    for path, body, param in (
        ("/select", {"text": "a", "choices": ["c", "d"]}, "choices[1]"),
        ("/v1/score", {"query": "a", "items": ["b"], "labels": ["c", "d"]}, "labels[1]"),
    ):
        reply = await post(served, path, body, 400)
        assert reply["error"]["param"] == param


async def test_adapters(served: Served) -> None:
    model = served.model
    model.model_info = msgspec.structs.replace(model.model_info, adapters=("formal",))
    pair = {"query": "a", "items": ["b"]}
    for path, body in (
        ("/v1/score", {**pair, "labels": ["c"]}),
        ("/v1/score", {**pair, "label_token_ids": [7]}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "method": "judge"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "method": "judge"}),
    ):
        assert (await post(served, path, {**body, "model": "fake:formal"}))["model"] == (
            "fake:formal"
        )
        (opened,) = [op for op in model.sessions[-1].ops if isinstance(op, Open)]
        assert opened.adapter == "formal"


async def test_nothing_before_a_label(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer without BOS makes no tokens of empty texts."""
    monkeypatch.setattr(served.model.tokenizer, "encode", lambda text: list(text.encode()))
    for labels in ({"label_token_ids": [5, 6]}, {"labels": ["a", "b"]}):
        body = {"query": "", "items": ["a", ""], **labels}
        reply = await post(served, "/v1/score", body, 400)
        assert reply["error"]["param"] == "items"
    reply = await post(served, "/select", {"text": "", "choices": ["a", "b"]}, 400)
    assert reply["error"]["param"] == "text"


@pytest.mark.parametrize("labels", [{"labels": ["a", "b"]}, {"label_token_ids": [1, 2]}])
async def test_many_labels_go_in_turns(
    served: Served, monkeypatch: pytest.MonkeyPatch, labels: dict[str, Any]
) -> None:
    """Labels are scored a few at a time, so that they do not fill the queue of all clients."""
    monkeypatch.setattr(scoring, "_AT_ONCE", 4)
    perform = FakeSession.perform
    running = most = 0
    limit = 2 if "labels" in labels else 4

    async def slow(session: FakeSession, op: Any, ids: list[int], emit: Any) -> Event:
        nonlocal running, most
        running += isinstance(op, Generate | Select)
        most = max(most, running)
        await asyncio.sleep(0)
        if isinstance(op, Generate | Select):
            await until(lambda: most >= limit)  # on a busy machine the others begin later
        result = await perform(session, op, ids, emit)
        running -= isinstance(op, Generate | Select)
        return result

    monkeypatch.setattr(FakeSession, "perform", slow)
    reply = await post(served, "/v1/score", {"query": "a", "items": ["b"] * 20, **labels})
    assert len(reply["scores"]) == 20
    assert most == limit


async def test_bounds(served: Served) -> None:
    long = "a" * (4 * 2**20)
    for body in (
        {"query": "a", "items": ["b"] * 400, "labels": ["c"] * 50},
        {"query": "a", "items": ["b"] * 400, "label_token_ids": [1] * 50},
        {"query": "a", "items": [long], "label_token_ids": [1]},
    ):
        reply = await post(served, "/v1/score", body, 400)
        assert reply["error"]["param"] == "items"
    await post(served, "/v1/rerank", {"query": "a", "documents": [long], "method": "judge"}, 400)
    assert not served.model.sessions
