"""What badly behaved clients cost the others: `python -m benchmarks.hostile_clients [--json FILE]`.

A server with the embedded model is asked for a token over and over, while others vanish in the
middle of a stream, send their requests a byte at a time, or send as much as the server takes.
Prints the latencies of who behaves; the engine checks its blocks after every step, and at the end
nothing may run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, table_of
from rootlace.runtime.assets import demo_model

VANISHING, SLOW = 1000, 500


@dataclass(frozen=True)
class Latency:
    """Of the requests that were well behaved meanwhile, in milliseconds."""

    load: str
    seconds: float
    requests: int
    median: float
    p99: float
    most: float


class Server:
    """Where to connect, and how to write a request."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._place = (parts.hostname, parts.port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._place)

    def request(self, path: str, body: object) -> bytes:
        data = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data


async def nothing(server: Server) -> None:
    await asyncio.sleep(5)


async def vanish(server: Server) -> None:
    """Ask for a long stream, and be gone when it begins or before."""

    async def one(number: int) -> None:
        reader, writer = await server.connect()
        body = {"prompt": f"{number}", "max_tokens": 500, "ignore_eos": True, "stream": True}
        writer.write(server.request("/v1/completions", body))
        await writer.drain()
        if number % 2:
            await reader.read(100)
        writer.transport.abort()

    for first in range(0, VANISHING, 50):
        await asyncio.gather(*(one(first + number) for number in range(50)))


async def slow(server: Server) -> None:
    """Hold connections with requests that come a byte at a time."""
    held = [await server.connect() for _ in range(SLOW)]
    request = server.request("/v1/completions", {"prompt": "a"})
    for byte in request[:20]:
        for _, writer in held:
            writer.write(bytes([byte]))
        await asyncio.sleep(0.2)
    for _, writer in held:
        writer.transport.abort()


async def large(server: Server) -> None:
    """Send what takes the longest to refuse or to answer."""
    many = [{"role": "user", "content": "hello there"}]
    async with aiohttp.ClientSession(server.url) as session:
        for path, body in (
            ("/tokenize", {"prompt": "e" * 2**20}),
            ("/tokenize", {"messages": many * 2**14}),
            ("/detokenize", {"tokens": [300] * 2**20}),
            ("/v1/chat/completions", {"messages": many * 100_000}),
            ("/v1/completions", {"prompt": [300] * 10**6}),
            ("/v1/completions", {"prompt": "word " * 3 * 2**20}),
            ("/v1/completions", {"prompt": "\n" * 7 * 2**20}),
            ("/v1/completions", {"prompt": "word " * 2**24}),
        ):
            async with session.post(path, data=msgspec.json.encode(body)) as reply:
                await reply.read()


async def measure(server: Server, load: Callable[[Server], Awaitable[None]]) -> Latency:
    began = time.perf_counter()
    hostile = asyncio.ensure_future(load(server))
    taken = []
    async with aiohttp.ClientSession(server.url) as session:
        while not hostile.done():
            before = time.perf_counter()
            body = {"prompt": "Once", "max_tokens": 1}
            async with session.post("/v1/completions", json=body) as reply:
                if reply.status != 200:
                    raise RuntimeError(await reply.text())
                await reply.read()
            taken.append(1000 * (time.perf_counter() - before))
            await asyncio.sleep(0.01)
    await hostile
    median, p99 = map(float, np.percentile(taken, [50, 99]))
    seconds = time.perf_counter() - began
    return Latency(load.__name__, seconds, len(taken), median, p99, max(taken))


def main() -> None:
    parser = new_parser("hostile_clients", __doc__)
    known = {load.__name__: load for load in (nothing, vanish, slow, large)}
    parser.add_argument("--loads", nargs="+", choices=known, default=list(known))
    args = parser.parse_args()
    console, report = console_of(100), Report("hostile_clients", args)
    with rl.Runtime(
        demo_model(), dtype="float32", device="cpu", http_port=0, check_invariants=True
    ) as runtime:
        server = Server(str(runtime.url))
        found = [asyncio.run(measure(server, load)) for load in map(known.__getitem__, args.loads)]
        for _ in range(100):
            status = runtime.endpoint.get_server_info()
            if not status["running"] and not status["sessions"] - 1:
                break
            time.sleep(0.1)
        console.print(f"left: {status['running']} running, {status['sessions'] - 1} sessions")
    shown = ("seconds", "requests", "median", "p99", "most")
    columns = {name: f"{{{name}:,.1f}}" for name in shown}
    rows = {one.load: asdict(one) for one in found}
    console.print(table_of("ms for a token meanwhile", rows, columns))
    report.add("latencies", found)
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
