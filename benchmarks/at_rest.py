"""Does a server keep anything of requests that have ended? `python -m benchmarks.at_rest
[--json FILE]`.

Bursts of requests of all kinds (chats, streams, streams that are left, schemas, regular
expressions, wrong ones), each on a connection of its own. Behind each burst, once everything is
closed, open files and private memory of server and engine are read: at rest, where no load hides
what is kept. The first bursts fill the cache of prompts and of constraints; the growth over the
last half of the bursts is told for each thousand requests. `benchmarks.soak` says the same of hours
under load, with what load itself takes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import psutil

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, new_table, progress_bar

AT_ONCE = 100
KINDS = ("chat", "stream", "left", "schema", "regex", "wrong")


@dataclass(frozen=True)
class Rest:
    """Open files, and MiB of private memory, after a number of requests."""

    requests: int
    server_files: int
    engine_files: int
    server_mib: float
    engine_mib: float


def request_of(number: int) -> tuple[str, str, dict[str, Any]]:
    """Return kind, path and body of a request."""
    kind = KINDS[number % len(KINDS)]
    said = f"tell {number * 7919 % 200} of {number * 104729 % 50}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "max_tokens": 12}
    if kind == "regex":
        params = {"max_new_tokens": 8, "regex": f"[ab]{{3}}|c{number % 20}"}
        return kind, "/generate", {"text": "a", "sampling_params": params}
    if kind in ("stream", "left"):
        body["stream"] = True
    if kind == "schema":
        named = {"a": {"type": "integer"}, "b": {"enum": ["x", "y", str(number % 40)]}}
        schema: dict[str, Any] = {"type": "object", "properties": named, "required": [*named]}
        schema["additionalProperties"] = False
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "made", "schema": schema},
        }
    if kind == "wrong":
        body["temperature"] = "hot"
    return kind, "/v1/chat/completions", body


async def ask(url: str, number: int) -> None:
    """Send a request. Raises RuntimeError if the answer is of another kind than the request."""
    kind, path, body = request_of(number)
    patience = aiohttp.ClientTimeout(total=None)  # enough for a busy machine
    async with (
        aiohttp.ClientSession(timeout=patience) as session,
        session.post(url + path, json=body) as reply,
    ):
        if (reply.status == 200) == (kind == "wrong"):
            raise RuntimeError(f"{kind}: {reply.status} {await reply.text()}")
        if kind == "left":
            await reply.content.readany()
        else:
            await reply.read()


async def burst(url: str, begin: int, count: int) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            await ask(url, number)

    await asyncio.gather(*map(one, range(begin, begin + count)))


def rest_of(requests: int, server: psutil.Process, engine: psutil.Process) -> Rest:
    files = (server.num_fds(), engine.num_fds())
    private = (process.memory_full_info().uss / 2**20 for process in (server, engine))
    return Rest(requests, *files, *private)


def growth(found: list[Rest], name: str) -> float:
    """Return the growth per thousand requests, by least squares over the last half of bursts."""
    later = found[len(found) // 2 :]
    thousands = [one.requests / 1000 for one in later]
    return float(np.polyfit(thousands, [getattr(one, name) for one in later], 1)[0])


async def measure(
    url: str, server: psutil.Process, bursts: int, count: int, pause: float
) -> list[Rest]:
    (engine,) = server.children()
    found = [rest_of(0, server, engine)]
    console = console_of(100)
    with progress_bar(console) as progress:
        bar = progress.add_task("bursts", total=bursts)
        for index in range(bursts):
            await burst(url, index * count, count)
            await asyncio.sleep(pause)  # lets the idle engine collect garbage
            found.append(rest_of((index + 1) * count, server, engine))
            progress.advance(bar)
    return found


def main() -> None:
    parser = new_parser("at_rest", __doc__)
    parser.add_argument("--bursts", type=int, default=60)
    parser.add_argument("--requests", type=int, default=2000, help="of a burst")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds behind each")
    args = parser.parse_args()
    report = Report("at_rest", args, "aiohttp")
    with rl.Runtime(http_port=0) as runtime:
        assert runtime.url is not None
        found = asyncio.run(
            measure(
                runtime.url, psutil.Process(runtime.pid), args.bursts, args.requests, args.pause
            )
        )
    names = ("server_files", "engine_files", "server_mib", "engine_mib")
    grown = {name: growth(found, name) for name in names}
    table = new_table("at rest", "behind requests", "server's files", "engine's", "MiB", "MiB ")
    for one in found[:: max(len(found) // 12, 1)]:
        files = (str(one.server_files), str(one.engine_files))
        table.add_row(f"{one.requests:,}", *files, f"{one.server_mib:.1f}", f"{one.engine_mib:.1f}")
    table.add_row("growth for 1,000", *(f"{grown[name]:.3f}" for name in names))
    console_of(100).print(table)
    report.add("at_rest", found)
    report.add("grown_per_thousand", grown)
    print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
