"""Requests that pages in browsers may make, and host names under which they may."""

from typing import Any

import pytest

from rootlace.runtime.server.http.connections import from_source
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel

PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type, authorization",
}


async def test_pages_are_kept_out_by_default(served: Served) -> None:
    async with served.http.options("/generate", headers=PREFLIGHT) as reply:
        assert reply.status == 403 and "Access-Control-Allow-Origin" not in reply.headers
        assert "--cors-origins https://page.example" in await reply.text()
    # A request without preflight would compute, though the page could not read the reply.
    headers = {"Origin": "https://page.example"}
    assert (await served.post("/generate", {"text": "a"}, headers=headers)).status == 403
    assert not served.model.sessions


async def test_where_a_key_keeps_strangers_out_no_page_reads_a_reply_either(serve: Serve) -> None:
    served = await serve(FakeModel(api_key="k"))
    async with served.http.options("/generate", headers=PREFLIGHT) as reply:
        assert reply.status == 403 and "--cors-origins" in await reply.text()
    headers = {"Origin": "https://page.example", "Authorization": "Bearer k"}
    async with served.http.get("/version", headers=headers) as reply:
        assert reply.status == 200
        assert not [name for name in reply.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("/flush_cache", {"Origin": "http://203.0.113.5"}, 403),
        ("/flush_cache", {"Origin": "http://localhost:3000"}, 403),
        ("/flush_cache", {"Origin": "http://127.0.0.1"}, 403),
        ("/flush_cache", {"Origin": "http://["}, 403),
        ("/flush_cache", {"Origin": "null"}, 403),
        ("/flush_cache", {"Origin": "http://OURS"}, 200),
        ("/flush_cache", {"Origin": "http://OURS", "Sec-Fetch-Site": "same-origin"}, 200),
        # An <img> or a link sends no origin.
        ("/version", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("/version", {"Sec-Fetch-Site": "same-site"}, 403),
        ("/version", {"Sec-Fetch-Site": "none"}, 200),
        ("/flush_cache", {}, 200),
        ("/", {"Sec-Fetch-Site": "cross-site"}, 200),
    ],
)
async def test_whose_pages_may_ask(
    served: Served, path: str, headers: dict[str, str], status: int
) -> None:
    """Pages of this server may ask; pages of an address or another port of this machine may not."""
    ours = served.url.removeprefix("http://")
    given = {name: value.replace("OURS", ours) for name, value in headers.items()}
    method = "POST" if path == "/flush_cache" else "GET"
    async with served.http.request(method, path, headers=given) as reply:
        assert reply.status == status
    assert served.model.flushed == (path == "/flush_cache" and status == 200)


async def test_a_front_says_for_whom_it_asks_and_nobody_else_does(serve: Serve) -> None:
    knows, alone = await serve(FakeModel(front_secret="s")), await serve(FakeModel())
    forged = [("X-Rootlace-Source", "s 203.0.113.9"), ("Host", "127.0.0.1")]
    for served, headers, said in (
        (knows, from_source(forged, "203.0.113.5", "s"), "203.0.113.5"),
        (knows, from_source([], "203.0.113.5", "t"), "127.0.0.1"),
        (knows, [], "127.0.0.1"),
        (alone, from_source([], "203.0.113.5", ""), "127.0.0.1"),
    ):
        assert (await served.post("/generate", {"text": "a"}, headers=headers)).status == 200
        assert served.model.sources[-1].partition("#")[0] == said
    rebound = from_source([("Host", "page.example")], "203.0.113.5", "s")
    async with knows.http.get("/version", headers=rebound) as reply:
        assert reply.status == 403 and "not known as 'page.example'" in await reply.text()


@pytest.mark.parametrize("allowed", ["*", "https://other.example, https://page.example/"])
async def test_pages_that_may_ask(serve: Serve, allowed: str) -> None:
    served = await serve(FakeModel(cors_origins=allowed, api_key="k"))
    async with served.http.options("/generate", headers=PREFLIGHT) as reply:
        assert reply.status == 204  # without the key: browsers send none
        assert reply.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert reply.headers["Access-Control-Allow-Methods"] == "POST"
        assert "authorization" in reply.headers["Access-Control-Allow-Headers"]
    headers = {"Origin": "https://page.example", "Authorization": "Bearer k"}
    body = {"text": "a", "stream": True}
    async with served.http.post("/generate", json=body, headers=headers) as reply:
        assert reply.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert "X-Rootlace-Cache" in reply.headers["Access-Control-Expose-Headers"]
    async with served.http.get("/health", headers={"Origin": "https://evil.example"}) as reply:
        seen = reply.headers.get("Access-Control-Allow-Origin")
        assert seen == ("https://evil.example" if allowed == "*" else None)


@pytest.mark.parametrize(
    "config, host, status",
    [
        ({}, "localhost:1", 200),
        ({}, "127.0.0.1", 200),
        ({}, "[::1]:30000", 200),
        ({}, "rebound.example", 403),
        ({}, "[::1", 403),
        ({}, "[", 403),
        ({"allowed_hosts": "rebound.example"}, "rebound.example:80", 200),
        ({"api_key": "k"}, "rebound.example", 200),
        ({"host": "0.0.0.0"}, "server.example", 200),
    ],
)
async def test_host_names(serve: Serve, config: dict[str, Any], host: str, status: int) -> None:
    """A page whose name resolves to this machine must not read answers of this server."""
    served = await serve(FakeModel(**config))
    assert (await served.get("/health", headers={"Host": host})).status == status


async def test_pages_are_kept_out_of_a_public_server_without_a_key(serve: Serve) -> None:
    served = await serve(FakeModel(host="0.0.0.0"))
    pages = (
        ({"Origin": "https://page.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "server.example", "Origin": "https://server.example"}, 200),
        ({"Host": "server.example"}, 200),
    )
    for headers, status in pages:
        assert (await served.post("/flush_cache", headers=headers)).status == status, headers
    assert served.model.flushed == 2
