"""A served fake model and clients for it."""

import functools
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from rootlace.runtime.server.http.app import make_runner
from tests.server.http.fake_model import FakeModel, stand_in


@dataclass(frozen=True)
class Reply:
    """A reply that was read to its end."""

    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


@functools.cache
def certificates() -> ssl.SSLContext:
    """Read the system's certificates once for all clients: no test here uses them."""
    return ssl.create_default_context()


@dataclass
class Served:
    model: FakeModel
    url: str
    http: aiohttp.ClientSession
    api_key: str
    runner: web.AppRunner
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def openai(self, api_key: str = "") -> openai.AsyncOpenAI:
        """A client that the fixture closes."""
        key = api_key or self.api_key or "none"
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=certificates()),
        )
        self.clients.append(client)
        return client

    async def get(self, path: str, **options: Any) -> Reply:
        """`options` are aiohttp's."""
        async with self.http.get(path, **options) as reply:
            return Reply(reply.status, reply.headers, await reply.text())

    async def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        """Send `body` as JSON; `options` are aiohttp's."""
        async with self.http.post(path, json=body, **options) as reply:
            return Reply(reply.status, reply.headers, await reply.text())


async def stop(served: Served) -> None:
    """End the server as a signal does; the fixture closes its clients."""
    await served.runner.cleanup()


Serve = Callable[[FakeModel], Awaitable[Served]]


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    stand_in(monkeypatch)
    runners: list[web.AppRunner] = []
    served: list[Served] = []

    async def start(model: FakeModel) -> Served:
        runner = make_runner(model)  # type: ignore[arg-type]
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}"
        http = aiohttp.ClientSession(url)
        served.append(Served(model, url, http, model.config.api_key, runner))
        return served[-1]

    yield start
    for one in served:
        await one.http.close()
        for client in one.clients:
            await client.close()
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(FakeModel())
