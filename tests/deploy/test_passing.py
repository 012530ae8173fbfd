"""What the gateway gets of a request that Serve passes on, over real HTTP and without a cluster."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from rootlace.runtime.server.http import middleware
from rootlace.runtime.server.http.connections import passed_to
from tests.server.http.conftest import Serve, serve
from tests.server.http.fake_model import FakeModel

__all__ = ["serve"]

SECRET = "between-the-two"


class Request:
    """As Starlette has it; `read` is how many pieces of the body were asked for."""

    def __init__(self, method: str, path: str, pieces: list[bytes], **headers: str) -> None:
        self.method, self.headers = method, headers
        self.url = SimpleNamespace(path=path, query="")
        self.client = SimpleNamespace(host="192.0.2.7")
        self._pieces, self.read = pieces, 0

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            self.read += 1
            yield piece


def post(pieces: list[bytes], **headers: str) -> Request:
    return Request("POST", "/v1/completions", pieces, **headers)


@pytest.mark.parametrize("sized", [False, True])
async def test_a_body_goes_on_as_it_comes_with_the_clients_address(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sized: bool
) -> None:
    seen: list[str] = []
    address_of = middleware.address_of
    monkeypatch.setattr(
        middleware, "address_of", lambda one: seen.append(address_of(one)) or seen[-1]
    )
    served = await serve(FakeModel(front_secret=SECRET))
    body = json.dumps({"prompt": "a" * 100, "max_tokens": 1}).encode()
    size = {"content-length": str(len(body))} if sized else {"transfer-encoding": "chunked"}
    for secret, address in ((SECRET, "192.0.2.7"), ("guessed", "127.0.0.1")):
        request = post([body[:50], body[50:]], **size)
        async with await passed_to(served.http, served.url, request, secret) as answer:
            assert answer.status == 200 and (await answer.json())["choices"]
        assert request.read == 2 and seen.pop() == address and not seen


async def test_too_large_a_body_is_not_read_to_its_end(serve: Serve) -> None:
    served = await serve(FakeModel(front_secret=SECRET, max_body_bytes=2**16))
    request = post([bytes(2**16)] * 10_000, **{"transfer-encoding": "chunked"})
    async with await passed_to(served.http, served.url, request, SECRET) as answer:
        assert answer.status == 413
    assert request.read < 10_000


async def test_a_request_without_a_body_has_none(serve: Serve) -> None:
    served = await serve(FakeModel(front_secret=SECRET))
    request: Any = Request("GET", "/health", [b"never"])
    async with await passed_to(served.http, served.url, request, SECRET) as answer:
        assert answer.status == 200
    assert request.read == 0
