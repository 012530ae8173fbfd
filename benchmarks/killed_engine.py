"""How long do streams pause when their engine is killed: `python -m benchmarks.killed_engine
[--json FILE]`.

Groups of streams share a prefix each, and every stream has a text of its own behind it. In the
middle of all streams the engine gets SIGKILL; a pause is the time from there to the stream's next
token, and to the eighth. Printed are the least, the median and the worst for each number of
streams, with a disk tier, with host memory and without, the engine's own start, and how many
streams went on as they do where nobody is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import psutil

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, table_of
from rootlace.runtime.assets import demo_model

WITHOUT, DISK, HOST = "no tier", "a disk", "host memory"
GROUP = 4
"""Streams that share a prefix."""
BEFORE, AFTER = 8, 8
"""Tokens that each stream gets before the kill, and that are waited for after it."""
HOST_GB = 4.0
TOKENS = 192
"""Of a stream: more than the first one gets until the last one has begun."""


@dataclass(frozen=True)
class Pauses:
    """Seconds. `first`: until a stream's next token; `eighth`: until its eighth; `start`: until the
    next engine was ready."""

    streams: int
    tier: str
    prefix_tokens: int
    own_tokens: int
    start: float
    first_least: float
    first_median: float
    first_worst: float
    eighth_median: float
    eighth_worst: float
    restored_tokens: int
    equal: int


def main() -> None:
    parser = new_parser("killed_engine", __doc__)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prefix-tokens", type=int, default=512, help="shared by four streams")
    parser.add_argument("--own-tokens", type=int, default=128, help="most of each stream's own")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    console, report = console_of(130), Report("killed_engine", args, "aiohttp")
    found = [
        asyncio.run(_measure(args, count, tier))
        for _ in range(args.rounds)
        for count in args.streams
        for tier in (WITHOUT, DISK, HOST)
    ]
    columns = {
        "engine up": "{start:.2f}",
        "first, least": "{first_least:.2f}",
        "median": "{first_median:.2f}",
        "worst": "{first_worst:.2f}",
        "eighth, median": "{eighth_median:.2f}",
        "worst ": "{eighth_worst:.2f}",
        "from disk": "{restored_tokens}",
        "equal": "{equal}",
    }
    rows = {f"{one.streams} streams, {one.tier}": asdict(one) for one in found}
    console.print(table_of("pauses after a kill, seconds", rows, columns))
    report.add("pauses", found)
    console.print(report.foreign_line())
    report.write()


async def _measure(args: argparse.Namespace, count: int, tier: str) -> Pauses:
    """Measure one server and one kill."""
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {
            DISK: {"cache_disk": folder},
            HOST: {"cache_host_gb": HOST_GB},
        }
        options = kinds.get(tier, {})
        runtime = rl.Runtime(args.model, http_port=0, stream_interval=0, **options)
        prompts, timeout = _prompts(args, count), aiohttp.ClientTimeout(None)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                return await _kill(args, runtime, session, prompts, tier)
        finally:
            await asyncio.to_thread(runtime.shutdown)


def _prompts(args: argparse.Namespace, count: int) -> list[list[int]]:
    """Put streams of a group far from each other, as clients come in any order."""
    order = random.Random(0)

    def made_up(length: int) -> list[int]:
        return [order.randrange(300, 500) for _ in range(length)]

    prefixes = [made_up(args.prefix_tokens) for _ in range(-(-count // GROUP))]
    least = args.own_tokens // 4
    return [
        prefixes[at % len(prefixes)] + made_up(order.randint(least, args.own_tokens))
        for at in range(count)
    ]


class Stream:
    """One request: the time of each token, and the text."""

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt
        self.times: list[float] = []
        self.text = ""

    async def read(self, session: aiohttp.ClientSession, runtime: rl.Runtime) -> None:
        """Read the stream to its end."""
        body = {
            "model": runtime.model_name,
            "prompt": self._prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(f"{runtime.url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    self.text += event["choices"][0]["text"]
                    self.times.append(time.perf_counter())


async def _kill(
    args: argparse.Namespace,
    runtime: rl.Runtime,
    session: aiohttp.ClientSession,
    prompts: list[list[int]],
    tier: str,
) -> Pauses:
    streams = [Stream(prompt) for prompt in prompts]
    reading = [asyncio.ensure_future(one.read(session, runtime)) for one in streams]
    while not all(len(one.times) >= BEFORE for one in streams):
        await asyncio.sleep(0.01)
        for task in reading:
            if task.done():
                task.result()
                raise RuntimeError("a stream ended before all had begun")
    (engine,) = psutil.Process(runtime.pid).children()
    engine.kill()
    killed = time.perf_counter()
    start = await _seconds_until_up(session, runtime, engine.pid, killed)
    await asyncio.gather(*reading)
    first, eighth = ([_pause(one, killed, count) for one in streams] for count in (1, AFTER))
    stats = await asyncio.to_thread(runtime.get_server_info)
    again = [Stream(prompt) for prompt in prompts]
    await asyncio.gather(*(one.read(session, runtime) for one in again))
    return Pauses(
        streams=len(streams),
        tier=tier,
        prefix_tokens=args.prefix_tokens,
        own_tokens=args.own_tokens,
        start=start,
        first_least=min(first),
        first_median=median(first),
        first_worst=max(first),
        eighth_median=median(eighth),
        eighth_worst=max(eighth),
        restored_tokens=int(stats.get("restored_tokens", 0)),
        equal=sum(one.text == other.text for one, other in zip(streams, again, strict=True)),
    )


async def _seconds_until_up(
    session: aiohttp.ClientSession, runtime: rl.Runtime, pid: int, killed: float
) -> float:
    """Return the seconds from the kill until the server is healthy with another engine."""
    while True:
        await asyncio.sleep(0.02)
        children = [one.pid for one in psutil.Process(runtime.pid).children()]
        if not children or pid in children:
            continue
        async with session.get(f"{runtime.url}/health") as reply:
            if reply.status == 200:
                return time.perf_counter() - killed


def _pause(stream: Stream, killed: float, count: int) -> float:
    """Return the seconds from the kill until `count` more tokens."""
    later = [at for at in stream.times if at > killed]
    return later[min(count, len(later)) - 1] - killed


if __name__ == "__main__":
    main()
