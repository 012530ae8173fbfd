"""Many large bodies that arrive slowly: the memory for all of them is bounded."""

import asyncio
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest

from rootlace.runtime.server.http import body as bodies
from rootlace.runtime.server.http.body import RECEIVING, Receiving
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel
from tests.waiting import soon, until

BODY, MOST = 2**16, 2**18
PART = MOST // 8 - 2**7
"""Seven of these leave less than 2**10 of what one client may have."""


def bounds(served: Served) -> Receiving:
    return served.runner.app[RECEIVING]


class Slow:
    """A request whose body comes as far as `size` bytes, until it may `go_on`."""

    def __init__(self, served: Served, size: int, http: aiohttp.ClientSession | None = None):
        self._size, self._go_on = size, asyncio.Event()
        headers = {"Content-Type": "application/json"}
        session = http or served.http
        url = f"{served.url}/v1/completions"
        self.reply = asyncio.ensure_future(session.post(url, data=self._body(), headers=headers))

    async def _body(self) -> AsyncIterator[bytes]:
        yield b'{"prompt": "a", "max_tokens": 1' + b" " * (self._size - 31)
        await self._go_on.wait()
        yield b"}"

    async def status(self) -> int:
        self._go_on.set()
        async with await soon(self.reply) as reply:
            return reply.status


async def slow_ones(served: Served, count: int, size: int) -> list[Slow]:
    before = bounds(served)._taken
    made = [Slow(served, size) for _ in range(count)]
    await until(lambda: bounds(served)._taken == before + count * size)
    return made


async def test_all_bodies_together_have_a_bound(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(FakeModel(max_body_bytes=BODY, max_receiving_bytes=MOST))
    slow = await slow_ones(served, 7, PART)
    for _ in range(3):
        async with await soon(Slow(served, 2**10).reply) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
            assert "too many large bodies" in await reply.text()
    assert len([one for one in caplog.records if one.name == bodies.__name__]) == 1
    assert [await one.status() for one in slow] == [200] * 7
    assert not bounds(served)._taken and not bounds(served)._of
    assert await Slow(served, BODY - 1).status() == 200


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have 127.0.0.1 only, not all of 127.0.0.0/8"
)
async def test_one_address_leaves_some_to_others(serve: Serve) -> None:
    served = await serve(FakeModel(max_body_bytes=BODY, max_receiving_bytes=MOST))
    slow = await slow_ones(served, 7, PART)
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as other:
        assert await Slow(served, MOST // 16, other).status() == 200
    assert await Slow(served, 2**10).status() == 429
    assert [await one.status() for one in slow] == [200] * 7


async def test_who_goes_away_makes_room(serve: Serve) -> None:
    served = await serve(FakeModel(max_body_bytes=BODY, max_receiving_bytes=MOST))
    slow = await slow_ones(served, 7, PART)
    for one in slow:
        one.reply.cancel()
    await until(lambda: not bounds(served)._taken)
    assert await Slow(served, BODY - 1).status() == 200


async def test_without_a_word_there_may_be_sixteen_of_the_largest(serve: Serve) -> None:
    served = await serve(FakeModel(max_body_bytes=2**12))
    slow = await slow_ones(served, 14, 2**12 - 1)
    assert await Slow(served, 2**12 - 1).status() == 429
    assert [await one.status() for one in slow] == [200] * 14


@pytest.mark.parametrize("most", [BODY, BODY // 2])
async def test_one_body_alone_is_always_received(serve: Serve, most: int) -> None:
    served = await serve(FakeModel(max_body_bytes=BODY, max_receiving_bytes=most))
    (slow,) = await slow_ones(served, 1, BODY - 1)
    assert await Slow(served, 2**10).status() == 429
    assert await slow.status() == 200
