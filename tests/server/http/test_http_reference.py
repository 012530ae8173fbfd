"""The OpenAPI document, the page and docs/api.md agree with the decoder."""

import json
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.server.http.app import endpoints
from rootlace.runtime.server.http.batch_store import Batch
from rootlace.runtime.server.http.body import decode_body
from rootlace.runtime.server.http.endpoint import fields
from rootlace.runtime.server.http.ollama import Embedded
from rootlace.runtime.server.http.scoring import EmbeddingReply
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import CacheReport
from scripts import api_reference
from tests.server.http.conftest import Served

NAME = "x"
SAID = '<think>hm</think>\n\nwell<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
USER = [{"role": "user", "content": "hi"}]
REPORT = {"return_cache_report": True}
PIN = {"cache": {"pin": True}}
CALLS = {"tools": [{"type": "function", "name": "f", "parameters": {}}]}
OLLAMA = {"model": "fake", "stream": False}
TOP = {"top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
BODIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # A path, a body that is answered, and a change that makes the body wrong.
    ("/v1/chat/completions", {"messages": USER, "temperature": 0.5, "stop": "a"}, {"stop": 3}),
    ("/v1/completions", {"prompt": [[1, 2]], "logit_bias": {"5": 1}}, {"prompt": None}),
    ("/v1/responses", {"input": USER}, {"input": {}}),
    ("/v1/responses", {"input": USER, **REPORT, **PIN, **CALLS}, {"tools": [{}]}),
    ("/v1/responses/input_tokens", {"input": USER}, {"input": {}}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}, {"max_tokens": "3"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 99, **REPORT}, {"thinking": 1}),
    ("/v1/messages/count_tokens", {"messages": USER}, {"messages": 1}),
    ("/api/chat", {"model": "fake", "messages": USER}, {"options": {"mirror": 1}}),
    ("/api/chat", {**OLLAMA, "messages": USER, **PIN}, {"messages": 1}),
    ("/api/chat", {**OLLAMA, "messages": []}, {"format": 1}),
    ("/api/generate", {**OLLAMA, "prompt": "a", **REPORT}, {"prompt": 1}),
    ("/api/show", {"model": "fake"}, {"model": 1}),
    ("/cache/explain", {"prompt": "a"}, {"prompt": 1}),
    ("/generate", {"text": ["a"], "sampling_params": [{"n": 1}]}, {"sampling_params": {"m": 1}}),
    ("/generate", {"text": "a", "return_logprob": True, **TOP, **PIN}, {"text": 1}),
    ("/tokenize", {"prompt": "a"}, {"promt": "a"}),
    ("/generate", {"text": "a", "input_ids": None}, {"input_ids": [1]}),
    ("/tokenize", {"messages": USER}, {"messages": None}),
]


async def _document(served: Served) -> dict[str, Any]:
    async with served.http.get("/openapi.json") as reply:
        assert reply.status == 200
        document: dict[str, Any] = await reply.json()
    return document


async def test_bodies_fit_the_document_exactly_if_they_are_decoded(served: Served) -> None:
    document = await _document(served)
    model = served.model
    model.chat.source = "{# <think> </think> #}"
    model.script = lambda prompt, index: SAID
    model.report = CacheReport(1, 3, "evicted", lost=1)
    for path, body, wrong in BODIES:
        operation = document["paths"][path]["post"]
        validator = _validator(document, operation["requestBody"])
        for given, status in ((body, 200), ({**body, **wrong}, 400), ({**body, NAME: 1}, 400)):
            async with served.http.post(path, json=given) as reply:
                assert reply.status == status, await reply.text()
                said = operation["responses"]["200" if status == 200 else "default"]
                assert reply.content_type in said["content"]
                if reply.content_type == "application/json":
                    _validator(document, said).validate(await reply.json())
            assert validator.is_valid(given) == (status == 200), (path, given)


VALUES = {
    "string": "x",
    "integer": 7,
    "number": 0.5,
    "boolean": True,
    "object": {"a": "b"},
    "list of (anything)": ["x"],
    "list of (integer)": [1],
    "list of (string)": ["x"],
}
MINIMAL = {path: body for path, body, _ in reversed(BODIES)} | {
    "/v1/batches": {
        "input_file_id": "x",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "labels": ["c"]},
    "/v1/rerank": {"query": "a", "documents": ["b"], "method": "judge"},
    "/api/embed": {"model": "fake", "input": "a"},
    "/api/embeddings": {"model": "fake", "prompt": ""},
    "/select": {"text": "a", "choices": ["b", "c"]},
    "/generate": {"text": "a"},
    "/detokenize": {"tokens": [97]},
    "/abort": {"rid": "x"},
    "/abort_request": {"rid": "x"},
    "/open_session": {"capacity_of_str_len": 9},
}


NOT_FAKED = (EmbeddingReply, Embedded, Batch)
"""Replies that the fake model does not give."""


def _decoded(given: Any, kind: Any) -> str:
    """Return the decoder's error for a body, or ""."""
    try:
        decode_body(json.dumps(given).encode(), kind)
    except InvalidRequest as error:
        return str(error)
    return ""


async def test_fields_stand_as_they_are_said_to(served: Served) -> None:
    """Each field that is documented as accepted without effect, or as refused, is sent."""
    asked, wrong = 0, []
    for endpoint in endpoints(served.model):  # type: ignore[arg-type]
        for field in fields(endpoint.body) if endpoint.body in endpoint.bodies else ():
            if field.standing is None or "." in field.path or endpoint.other_body:
                continue
            asked += 1
            value = VALUES.get(field.type.split(" or ")[0], "x")
            given = MINIMAL[endpoint.path] | {field.path: value}
            if endpoint.reply in NOT_FAKED:
                said = _decoded(given, endpoint.body)
            else:
                async with served.http.post(endpoint.path, json=given) as reply:
                    said = "" if reply.ok else await reply.text()
            refusal = f"{field.path} is not supported" if field.standing.kind == "refused" else ""
            if refusal not in said or bool(refusal) != bool(said):
                wrong.append((endpoint.path, field, said))
    assert not wrong and asked > 100


async def test_replies_and_queries_fit_the_document(served: Served) -> None:
    document = await _document(served)
    for path, methods in document["paths"].items():
        if "get" not in methods or "{" in path:
            continue
        (kind, *_) = methods["get"]["responses"]["200"]["content"]
        async with served.http.get(path) as reply:
            assert reply.status != 200 or reply.content_type == kind, path
            if kind == "application/json":
                said = methods["get"]["responses"]["200" if reply.status == 200 else "default"]
                _validator(document, said).validate(await reply.json())
    tree = document["paths"]["/cache/tree"]["get"]["parameters"]
    assert {p["name"]: p["schema"].get("maximum") for p in tree}.keys() == {
        "namespace",
        "under",
        "limit",
        "model",
    }
    for wrong in ("limit=2001", "limit=x", "under=-1", "surprise=1"):
        async with served.http.get(f"/cache/tree?{wrong}") as reply:
            assert reply.status == 400 and (await reply.json())["error"]["param"]


def _validator(document: dict[str, Any], said: dict[str, Any]) -> jsonschema.Draft202012Validator:
    schema = said["content"]["application/json"].get("schema", {})
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


async def test_the_document_names_every_path_once(served: Served) -> None:
    document = await _document(served)
    operations = [
        (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    ]
    # Clients that make bodies from the document alone use the served model's name.
    schemas = document["components"]["schemas"].values()
    named = [one["properties"]["model"] for one in schemas if "model" in one.get("properties", {})]
    assert len(named) > 10 and all(model["examples"] == ["fake"] for model in named)
    ids = [operation["operationId"] for _, operation in operations]
    assert len(set(ids)) == len(ids)
    for path, operation in operations:
        declared = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    schema = document["components"]["schemas"][
        chat["application/json"]["schema"]["$ref"].rpartition("/")[2]
    ]
    about = schema["properties"]["keep_alive"]
    assert about["description"].startswith("Accepted, and changes nothing")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "img", "link") and "src" not in given  # no other servers
        if tag == "h2":
            self.anchors.add(given["id"] or "")
        elif tag == "a":
            self.links.add(given["href"] or "")


async def test_the_page_is_whole(served: Served) -> None:
    async with served.http.get("/docs") as reply:
        assert (reply.status, reply.content_type) == (200, "text/html")
        text = await reply.text()
    page = _Page()
    page.feed(text)
    assert page.links == {f"#{anchor}" for anchor in page.anchors} | {"openapi.json", "./"}
    assert len(page.anchors) == len(await _operations(served))
    assert "messages[].role" in text


async def _operations(served: Served) -> list[str]:
    document = await _document(served)
    return [method for methods in document["paths"].values() for method in methods]


def test_the_documentation_is_what_the_types_say() -> None:
    if api_reference.PAGE.read_text("utf-8") != api_reference.page():
        pytest.fail("docs/api.md is old: python scripts/api_reference.py writes it")
    if api_reference.LANGUAGE.read_text("utf-8") != api_reference.language_page():
        pytest.fail("docs/language.md is old: python scripts/api_reference.py writes its table")
