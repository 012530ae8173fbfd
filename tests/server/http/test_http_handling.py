"""Priority, timeout and cache in every body, and pins."""

import json
from typing import Any

import pytest

from rootlace.wire.protocol import CacheReport, Generate, Open, Select
from rootlace.wire.sampling import Cache, Handling
from tests.server.http.conftest import Served

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/api/chat": CHAT,
    "/api/generate": {"model": "fake", "prompt": "a", "stream": False, "raw": True},
    "/generate": {"text": "a"},
    "/select": {"text": "a", "choices": ["b", "c"]},
    "/v1/score": {"query": "a", "items": ["b"], "labels": ["c", "d"]},
    "/v1/rerank": {"query": "a", "documents": ["b"], "method": "judge"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_says_how_it_is_to_be_served(served: Served, path: str) -> None:
    more = {"priority": 2, "timeout": 50, "cache": {"ttl": 9}}
    assert (await served.post(path, {**BODIES[path], **more})).status == 200
    given = [op for op in served.model.sessions[-1].ops if isinstance(op, Generate | Select)]
    for op in given:
        assert op.handling.timeout is not None and 49 < op.handling.timeout <= 50
        assert op.handling == Handling(2, op.handling.timeout, Cache(ttl=9))
    assert given
    assert (await served.post(path, {**BODIES[path], "cache": {"share": False}})).status == 200
    assert not any(op.share for op in served.model.sessions[-1].ops if isinstance(op, Open))


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"priority": 101}, "priority"),
        ("/generate", {"timeout": 0}, "timeout"),
        ("/v1/messages", {"cache": {"pin": True, "share": False}}, "cache"),
        ("/select", {"cache": {"pin": True}}, "cache.pin"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    served: Served, path: str, more: dict[str, Any], param: str
) -> None:
    async with served.http.post(path, json={**BODIES[path], **more}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == param


async def test_a_header_says_what_was_cached(served: Served) -> None:
    """The fake model finds half of a prompt: `a` and its BOS are two tokens."""
    async with served.http.post("/v1/completions", json={"prompt": ["a", "bcd"]}) as reply:
        assert json.loads(reply.headers["x-rootlace-cache"]) == {"cached": 1 + 2, "prompt": 2 + 4}
    body = {"prompt": "a", "stream": True}
    async with served.http.post("/v1/completions", json=body) as reply:
        assert json.loads(reply.headers["x-rootlace-cache"]) == {"cached": 1}
        await reply.read()
    assert "x-rootlace-cache" not in (await served.get("/v1/models")).headers


@pytest.mark.parametrize("path", list(BODIES)[:7])
async def test_reports_and_pins_are_in_every_reply(served: Served, path: str) -> None:
    served.model.report = CacheReport(1, 5, "differs", before="β", lost=2)
    body = {**BODIES[path], "return_cache_report": True, "cache": {"pin": True}}
    async with served.http.post(path, json=body) as reply:
        text = await reply.text()
        header = json.loads(reply.headers["x-rootlace-cache"])
    assert header["reports"] == [{"matched": 1, "limit": 5, "reason": "differs", "lost": 2}]
    assert '"says":' in text and '"before":"β"' in text and '"p1"' in text
