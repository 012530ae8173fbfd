"""Cost of badly behaved clients to others: `python -m benchmarks.hostile_clients [--json FILE]`.

A server with the embedded model gets requests for one token, while hostile clients disconnect in
the middle of a stream, send requests a byte at a time, or send as much as the server takes. Prints
the latencies of the others; the engine checks its blocks after every step, and ends idle.

With `--model FILE` hostile clients ask for much instead: a long prompt, the best of 4,096 choices,
scores of a prompt, or samples by the hundred. Each load runs with each of `--bounds`, seconds of a
step (0: none), for `--seconds` at most, in turns for `--rounds`; computed and sampled tokens per
second show its share. Printed are medians of the rounds, and the longest wait. All connections come
from one address, as behind a proxy. With `--other PYTHON`, the interpreter of an environment with
another version of Rootlace, that version's server takes turns, too, with its defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, table_of
from rootlace.runtime.assets import demo_model

VANISHING, SLOW = 1000, 500
PROMPT, CHOICES, SAMPLES, ASKERS = 4000, 4096, 128, 32


@dataclass(frozen=True)
class Latency:
    """Latency of well-behaved requests meanwhile, in milliseconds."""

    load: str
    seconds: float
    requests: int
    median: float
    p99: float
    most: float
    server: str = ""
    """The bound of a step in seconds, or `OTHER`."""
    tokens_per_second: float = 0.0
    """Computed and drawn for all, while the load lasted."""


class Server:
    """Address of a server, and form of a request."""

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
    """Ask for a long stream; disconnect when it begins or before."""

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
    """Hold connections with requests that arrive a byte at a time."""
    held = [await server.connect() for _ in range(SLOW)]
    request = server.request("/v1/completions", {"prompt": "a"})
    for byte in request[:20]:
        for _, writer in held:
            writer.write(bytes([byte]))
        await asyncio.sleep(0.2)
    for _, writer in held:
        writer.transport.abort()


async def large(server: Server) -> None:
    """Send the bodies that take longest to refuse or to answer."""
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


async def _post(server: Server, path: str, body: object) -> None:
    """Ask on a new connection, without a time limit."""
    patience = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(server.url, timeout=patience) as session,
        session.post(path, json=body) as reply,
    ):
        if reply.status != 200:
            raise RuntimeError(await reply.text())
        await reply.read()


def _ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 9000, count).tolist()


async def prompt(server: Server) -> None:
    """Send two long prompts, one after the other."""
    for seed in (1, 2):
        await _post(server, "/v1/completions", {"prompt": _ids(PROMPT, seed), "max_tokens": 1})


async def select(server: Server) -> None:
    choices = [f" number {number}" for number in range(CHOICES)]
    await _post(server, "/select", {"text": "The best of all numbers is", "choices": choices})


async def echo(server: Server) -> None:
    body = {"prompt": _ids(PROMPT, 3), "max_tokens": 0, "echo": True, "logprobs": 1}
    await _post(server, "/v1/completions", body)


async def samples(server: Server) -> None:
    def body(seed: int) -> dict[str, object]:
        asked = {"prompt": _ids(40, seed), "n": SAMPLES, "max_tokens": 8, "ignore_eos": True}
        return {**asked, "seed": seed}

    bodies = (body(100 + seed) for seed in range(ASKERS))
    await asyncio.gather(*(_post(server, "/v1/completions", one) for one in bodies))


async def measure(
    server: Server, load: Callable[[Server], Awaitable[None]], seconds: float | None = None
) -> Latency:
    """Ask for single tokens until the load ends, or for `seconds`."""
    began = time.perf_counter()
    hostile = asyncio.ensure_future(load(server))
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, hostile.cancel)
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
    if not hostile.cancelled():
        await hostile
    middle, p99 = map(float, np.percentile(taken, [50, 99]))
    seconds = time.perf_counter() - began
    return Latency(load.__name__, seconds, len(taken), middle, p99, max(taken))


OTHER = "other"
_SERVE = """
import sys, rootlace as rl
with rl.Runtime(sys.argv[1], device="cpu", http_port=0) as runtime:
    print(runtime.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def _serving(args: argparse.Namespace, server: str) -> Iterator[Server]:
    if server != OTHER:
        with rl.Runtime(
            args.model, device="cpu", http_port=0, step_seconds=float(server)
        ) as runtime:
            yield Server(str(runtime.url))
        return
    command = [args.other, "-c", _SERVE, str(args.model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield Server(process.stdout.readline().strip())
        process.stdin.close()


def _beside_much(args: argparse.Namespace) -> list[Latency]:
    """Use a server for each load and bound, so that no load finds another's cache."""
    found = []
    servers = [f"{bound:g}" for bound in args.bounds] + [OTHER] * bool(args.other)
    for load in args.loads or BIG:
        rounds: dict[str, list[Latency]] = {server: [] for server in servers}
        for at in range(args.rounds):
            for name in servers if at % 2 == 0 else reversed(servers):
                with _serving(args, name) as server:
                    asyncio.run(measure(server, nothing, 5.0))  # the first steps are not measured
                    before = asyncio.run(_computed(server))
                    one = asyncio.run(measure(server, BIG[load], args.seconds))
                    rate = (asyncio.run(_computed(server)) - before) / one.seconds
                rounds[name].append(replace(one, server=name, tokens_per_second=rate))
                print(rounds[name][-1], flush=True)
        for all_rounds in rounds.values():
            averaged = ("seconds", "requests", "median", "p99", "tokens_per_second")
            middle = {name: median(getattr(one, name) for one in all_rounds) for name in averaged}
            most = max(one.most for one in all_rounds)
            found.append(replace(all_rounds[0], **middle, most=most))
    return found


async def _computed(server: Server) -> int:
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.get("/get_server_info") as reply,
    ):
        status = (await reply.json())["status"]
        return int(status["computed_tokens"] + status["output_tokens"])


SMALL = {load.__name__: load for load in (nothing, vanish, slow, large)}
BIG = {load.__name__: load for load in (nothing, prompt, select, echo, samples)}


def main() -> None:
    parser = new_parser("hostile_clients", __doc__)
    parser.add_argument("--loads", nargs="+", choices=SMALL | BIG)
    parser.add_argument("--model", type=Path, help="ask much of this one")
    parser.add_argument("--bounds", nargs="+", type=float, default=[0.0, 0.25])
    parser.add_argument("--other", help="interpreter with another version of Rootlace")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    console, report = console_of(100), Report("hostile_clients", args)
    if args.model:
        found = _beside_much(args)
        columns = {"server": "{server}", "tokens/s": "{tokens_per_second:,.0f}"}
        columns |= {name: f"{{{name}:,.0f}}" for name in ("requests", "median", "p99", "most")}
        rows = {f"{one.load} {one.server}": asdict(one) for one in found}
        console.print(table_of("ms for a token meanwhile", rows, columns))
        report.add("latencies", found)
        console.print(report.foreign_line())
        report.write()
        return
    with rl.Runtime(
        demo_model(), dtype="float32", device="cpu", http_port=0, check_invariants=True
    ) as runtime:
        server = Server(str(runtime.url))
        loads = [SMALL[name] for name in args.loads or SMALL]
        found = [asyncio.run(measure(server, load)) for load in loads]
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
