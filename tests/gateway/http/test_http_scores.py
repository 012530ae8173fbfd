"""Scores of labels and ranks of texts, over a gateway that likes what a prompt holds often."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rootlace.wire.protocol import Open, Tokens
from tests.gateway.http.conftest import Served


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
    assert [op.namespace for op in served.gateway.sessions[-1].ops if isinstance(op, Open)] == [
        "t",
        "t",
    ]
    reply = await post(served, "/v1/score", {**body, "apply_softmax": True, "item_first": True})
    assert reply["scores"][1] == [0.5, 0.5]
    assert sum(reply["scores"][0]) == pytest.approx(1)
    assert served.gateway.sessions[-1].closed


async def test_labels_that_are_tokens(served: Served) -> None:
    body = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [7, 8]}
    reply = await post(served, "/v1/score", body)
    assert reply["scores"] == [[pytest.approx(math.exp(-0.5))] * 2] * 2
    appended = [op.parts for op in served.gateway.sessions[-1].ops if hasattr(op, "parts")]
    assert appended == [
        (Tokens(ids),) for ids in ((1, 2, 3, 7), (1, 2, 3, 8), (1, 2, 4, 5, 7), (1, 2, 4, 5, 8))
    ]
    assert served.gateway.last_generate.params.max_tokens == 0


async def test_relevance(served: Served) -> None:
    documents = ["no", "yes yes", {"text": "yes"}, "no no"]
    body = {"query": "q", "documents": documents, "top_n": 3}
    reply = await post(served, "/v1/rerank", body)
    assert [result["index"] for result in reply["results"]] == [1, 2, 0]
    assert reply["results"][1]["document"] == {"text": "yes"}
    assert all(0 < result["relevance_score"] < 1 for result in reply["results"])
    asked = served.gateway.chat.last["messages"][-1]["content"]
    assert "<Query>: q" in asked and "<Document>: no no" in asked
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    pairs = await post(served, "/v1/score", {"text_1": "q", "text_2": texts})
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
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
async def test_refusals(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    reply = await post(served, path, body, 400)
    assert reply["error"]["param"] == param
    assert not served.gateway.sessions
