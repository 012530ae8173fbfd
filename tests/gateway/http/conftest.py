"""A served fake gateway and clients for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import openai
import pytest
from aiohttp import web

from rootlace.runtime.gateway.http.app import make_runner
from tests.gateway.http.fake_gateway import FakeGateway


@dataclass
class Served:
    gateway: FakeGateway
    url: str
    http: aiohttp.ClientSession
    api_key: str

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0
        )

    def sync_openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0
        )


Serve = Callable[[FakeGateway], Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners, sessions = [], []

    async def start(gateway: FakeGateway) -> Served:
        runner = make_runner(gateway)  # type: ignore[arg-type]
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}"
        sessions.append(aiohttp.ClientSession(url))
        return Served(gateway, url, sessions[-1], gateway.config.api_key)

    yield start
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(FakeGateway())
