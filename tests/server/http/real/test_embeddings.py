"""Embeddings over the real gateway."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.server.http import scoring
from rootlace.wire.sampling import Cache, Handling
from tests.server.fake_engine import made_up_vector
from tests.server.http.conftest import Serve, Served
from tests.server.http.real.served import engine_of, serve_real
from tests.tiny_model import TEMPLATE, make_tiny_model


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_how_embeddings_are_served(real: Served, path: str) -> None:
    engine, body = engine_of(real), {"model": "tiny", "input": "a"}

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


async def test_what_ollamas_clients_require_beside_vectors(real: Served) -> None:
    """Vercel's `ollama-ai-provider-v2` refuses an answer without the durations."""
    async with real.http.post("/api/embed", json={"model": "tiny", "input": ["a", "b"]}) as reply:
        said = await reply.json()
    assert len(said["embeddings"]) == 2 and said["prompt_eval_count"] > 0
    assert said["total_duration"] > 0 and said["load_duration"] == 0


async def test_a_vector_for_ollamas_older_clients(real: Served, reference: FastTokenizer) -> None:
    """`/api/embeddings` leaves the vector's length; `/api/embed` makes the length 1."""
    wanted = made_up_vector(tuple(reference.encode("a").ids), "last")
    for prompt, vector in (("a", wanted), ("", np.empty(0))):
        body = {"model": "tiny:latest", "prompt": prompt}
        async with real.http.post("/api/embeddings", json=body) as reply:
            assert reply.status == 200
            assert np.allclose((await reply.json())["embedding"], vector)
    async with real.http.post("/api/embeddings", json={"model": "tiny", "prompt": "x " * 600}) as r:
        assert r.status == 400 and "prompt" in await r.text()


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
    (item,) = (await real.post("/v1/embeddings", of_ids)).json()["data"]
    assert np.allclose(item["embedding"], made_up_vector(ids[0], "mean")[:2])
    real.model.own_pooling = "mean"  # type: ignore[attr-defined]
    (item,) = (await client.embeddings.create(model="tiny", input=[*ids[:1]])).data
    wanted[0] = made_up_vector(ids[0], "mean")
    assert np.allclose(item.embedding, wanted[0] / np.linalg.norm(wanted[0]))
    real.model.own_pooling = "cls_token"  # type: ignore[attr-defined]
    async with real.http.post("/v1/embeddings", json={"input": "a"}) as response:
        assert (
            response.status == 400 and "(cls_token)" in (await response.json())["error"]["message"]
        )
    real.model.own_pooling = "last"  # type: ignore[attr-defined]
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


async def test_a_head_of_one_label_scores_pairs(real: Served, reference: FastTokenizer) -> None:
    """The number of labels decides, not the model's name; another head embeds, and cannot rank."""
    engine, info = engine_of(real), real.model.model_info

    async def ask(labels: int | None, path: str = "/x", **body: Any) -> tuple[int, Any]:
        real.model.model_info = msgspec.structs.replace(info, labels=labels, path=path)
        body = {"query": "q", "documents": ["good", "a"], **body}
        async with real.http.post("/v1/rerank", json=body) as reply:
            return reply.status, await reply.json()

    for path in ("/x", "/models/Qwen3-Reranker-0.6B-seq-cls"):
        _, ranked = await ask(1, path, timeout=9)
        assert ranked["method"] == "cross-encoder"
        pairs = [tuple(reference.encode("q", text).ids) for text in ("good", "a")]
        asked = engine.submitted[-2:]
        assert [tuple(one.token_ids.tolist()) for one in asked] == pairs
        assert {one.pooling for one in asked} == {"labels"} and asked[0].handling.timeout == 9
        wanted = {
            i: 1 / (1 + np.exp(-made_up_vector(one, "labels")[0])) for i, one in enumerate(pairs)
        }
        found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
        assert found == pytest.approx(wanted)
        assert ranked["usage"]["prompt_tokens"] == sum(map(len, pairs))
    for labels in (0, 3):
        _, ranked = await ask(labels, "/models/Qwen3-Reranker-0.6B-seq-cls")
        assert ranked["method"] == "embeddings" and engine.submitted[-1].pooling == "last"
    for labels, given, param, words in (
        (3, {"method": "cross-encoder"}, "method", "of 3 labels"),
        (None, {"method": "cross-encoder"}, "method", "a language model"),
        (1, {"method": "judge"}, "method", "generates no text"),
        (1, {"instruction": "Which?"}, "instruction", "judge"),
        (1, {"documents": ["a", "x" * 9000]}, "documents[1]", "9001 tokens"),
        (1, {"documents": ["a", "x " * 400]}, "documents[1]", "context"),
    ):
        status, reply = await ask(labels, **given)
        assert (status, reply["error"]["param"]) == (400, param), reply
        assert words in reply["error"]["message"]


async def test_a_head_of_one_label_behind_the_question_of_rerankers(
    folder: str, serve: Serve, reference: FastTokenizer, tmp_path: Path
) -> None:
    """A template with that question shows that the model was trained as a reranker."""
    template = TEMPLATE + "{# " + scoring._JUDGE + " #}"
    served = await serve_real(
        str(make_tiny_model(tmp_path / "m", template=template)), serve, reference
    )
    info = served.model.model_info
    served.model.model_info = msgspec.structs.replace(info, labels=1, path="/x")
    body = {"query": "q", "documents": ["a"], "instruction": "Which?"}
    assert (await served.post("/v1/rerank", body)).json()["method"] == "cross-encoder"
    (request,) = engine_of(served).submitted
    text = reference.decode(request.token_ids.tolist(), skip_special_tokens=False)
    assert "<Instruct>: Which?\n\n<Query>: q\n\n<Document>: a<|end|><|assistant|>" in text
    assert text.startswith(f"<|system|>{scoring._JUDGE}<|end|>") and request.pooling == "labels"


async def test_a_model_that_is_no_reranker_ranks_by_embeddings(
    real: Served, reference: FastTokenizer
) -> None:
    texts = ["q", "good", "a", "héllo"]
    ids = [tuple(reference.encode(text).ids) for text in texts]
    vectors = [made_up_vector(one, "last") for one in ids]
    query, *others = [vector / np.linalg.norm(vector) for vector in vectors]
    wanted = [float(query @ one) for one in others]
    engine = engine_of(real)

    async def ask(path: str, **body: Any) -> tuple[int, Any]:
        async with real.http.post(path, json=body) as reply:
            return reply.status, await reply.json()

    pair = {"text_1": "q", "text_2": texts[1:]}
    _, scored = await ask("/v1/score", **pair, timeout=9, cache_salt="t")
    assert scored["method"] == "embeddings"
    assert [one["score"] for one in scored["data"]] == [pytest.approx(one) for one in wanted]
    assert scored["usage"]["prompt_tokens"] == sum(map(len, ids))  # each text counts once
    assert len(engine.submitted) == len(texts) and engine.submitted[-1].pooling == "last"
    assert engine.submitted[-1].namespace and engine.submitted[-1].handling == Handling(timeout=9)
    _, ranked = await ask("/v1/rerank", query="q", documents=texts[1:], top_n=2)
    assert ranked["method"] == "embeddings"
    order = sorted(range(3), key=lambda index: -wanted[index])[:2]
    assert [one["index"] for one in ranked["results"]] == order
    assert ranked["results"][0]["relevance_score"] == pytest.approx(wanted[order[0]])
    # A client may ask for the judge, which is the default for rerankers by name.
    _, judged = await ask("/v1/score", **pair, method="judge", instruction="Which?")
    assert judged["method"] == "judge" and judged["data"] != scored["data"]
    info = real.model.model_info
    real.model.model_info = msgspec.structs.replace(info, path="/models/Qwen3-Reranker-0.6B")
    for method, expected in ((None, "judge"), ("embeddings", "embeddings")):
        _, ranked = await ask("/v1/rerank", query="q", documents=["a"], method=method)
        assert ranked["method"] == expected
    for path, expected in (
        ("/hub/models--Qwen--Qwen3-Reranker-0.6B/snapshots/0a1b", "judge"),
        ("/home/me/rerankers/tiny", "embeddings"),  # the folder's name counts, not its parent's
    ):
        real.model.model_info = msgspec.structs.replace(info, path=path)
        _, ranked = await ask("/v1/rerank", query="q", documents=["a"])
        assert ranked["method"] == expected, path
    real.model.model_info = info
    for given, param in (
        ({"instruction": "Which?"}, "instruction"),
        ({"method": "cosine"}, "method"),
        ({"documents": ["a", "x" * 9000]}, "documents[1]"),
    ):
        status, reply = await ask("/v1/rerank", **{"query": "q", "documents": ["a"], **given})
        assert (status, reply["error"]["param"]) == (400, param), reply
