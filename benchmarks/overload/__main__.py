"""Goodput of a server under overload: `python -m benchmarks.overload [--simulate] [--json FILE]`.

Requests are sent at random times, each with a timeout. By offering rates, the benchmark finds the
highest rate at which a server with the embedded model answers nearly all in time. Then it sends
0.5, 1, 2 and 3 times that rate, and measures how many are answered in time (*goodput*), how many
late, and how soon the others are refused. At last one client sends thousands of requests at once
and ten others one each. Remote clients take no core from the server: here clients get one only
after the server's threads had their turns.

Ten minutes of three times the rate: `--factors 1 3 --last-seconds 600 --timeout 3` (a quarter of an
hour).

With `--simulate` the real scheduler serves the same on a simulated clock, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

import rootlace as rl
from benchmarks.common import Report, aim, console_of, new_parser, table_of
from benchmarks.overload.client import Client
from benchmarks.overload.goodput import Fate, Goodput, arrivals, goodput_of, goodput_over_best
from benchmarks.overload.simulated import Load, Simulation, capacity
from benchmarks.overload.sustainable import sustainable
from rootlace.runtime.assets import demo_model
from rootlace.runtime.processes import give_way
from rootlace.runtime.server.http.request_fields import MAX_PROMPTS

FACTORS = (0.5, 1.0, 2.0, 3.0)
FIRST_RATE = 32.0
"""Per second, of the search."""
TRIAL_TIMEOUTS = 8
"""How long each rate of the search is offered."""
OTHERS = 10
COLUMNS = {
    "offered/s": "{offered:.1f}",
    "in time/s": "{good:.2f}",
    "late": "{late:.1%}",
    "refused": "{refused:.1%}",
    "failed": "{failed:.1%}",
    "answer p50, s": "{answered_p50:.2f}",
    "p99": "{answered_p99:.2f}",
    "refusal p50, s": "{refused_p50:.3f}",
    "p99 ": "{refused_p99:.3f}",
}


class Asker:
    """Asks for completions of new prompts."""

    def __init__(self, url: str, load: Load, seed: int) -> None:
        self._url = url
        self._load = load
        self._dice = np.random.default_rng(seed)

    def session(self, address: str = "127.0.0.1") -> Client:
        return Client(self._url, address)

    def prompt(self) -> list[int]:
        return self._dice.integers(300, 4000, self._load.prompt).tolist()

    async def ask(self, http: Client, timeout: float | None) -> Fate:
        load, began = self._load, time.perf_counter()
        body: dict[str, Any] = {
            "prompt": self.prompt(),
            "max_tokens": load.output,
            "ignore_eos": True,
            "temperature": 0,
        }
        if timeout is not None:
            body["timeout"] = timeout
        try:
            status = await http.post("/v1/completions", msgspec.json.encode(body))
            kind = {200: "in time", 408: "late", 429: "refused"}.get(status, "failed")
        except OSError:
            kind = "failed"
        seconds = time.perf_counter() - began
        # The client's own time to send and read is not the server's.
        if kind == "in time" and timeout is not None and seconds > 1.1 * timeout:
            kind = "late"
        return Fate(kind, seconds)


async def offer(asker: Asker, load: Load, rate: float, seconds: float, seed: int) -> Goodput:
    times = arrivals(rate, seconds, seed)
    async with asker.session() as http:
        began = time.perf_counter()
        tasks = []
        for at in times:
            await asyncio.sleep(max(began + at - time.perf_counter(), 0))
            tasks.append(asyncio.ensure_future(asker.ask(http, load.timeout)))
        fates = await asyncio.gather(*tasks)
    return goodput_of(fates, seconds)


async def crowd(asker: Asker, load: Load, many: int) -> dict[str, float]:
    """Let one client send `many` requests at once, and ten others one each behind these. Return the
    seconds until the ten are answered, and the same without the first client."""

    async def ten() -> list[float]:
        async with contextlib.AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(asker.session(f"127.0.0.{number + 10}"))
                for number in range(OTHERS)
            ]
            fates = await asyncio.gather(*(asker.ask(one, None) for one in sessions))
        return [one.seconds for one in fates]

    alone = max(await ten())
    sampling = {"max_new_tokens": load.output, "temperature": 0, "ignore_eos": True}
    short = [asker.prompt()[:32] for _ in range(many)]
    async with asker.session("127.0.0.9") as http:
        began = time.perf_counter()

        async def part(prompts: list[list[int]]) -> int:
            body = {"input_ids": prompts, "sampling_params": sampling}
            return await http.post("/generate", msgspec.json.encode(body))

        parts = [short[at : at + MAX_PROMPTS] for at in range(0, many, MAX_PROMPTS)]
        greedy = asyncio.gather(*(part(one) for one in parts))
        await asyncio.sleep(2)
        behind = max(await ten())
        finished = greedy.done()
        status, seconds = max(await greedy), time.perf_counter() - began
    if status != 200:
        raise RuntimeError(f"the client with {many} requests got {status}")
    return {
        "many": many,
        "alone_s": alone,
        "behind_s": behind,
        "greedy_s": seconds,
        "greedy_done_before_others": float(finished),
    }


def simulated(load: Load, seconds: float, seed: int) -> tuple[float, dict[str, Goodput]]:
    rate = capacity(load)
    rows = {f"{f:g}": Simulation(load, f * rate, seconds, seed).run() for f in FACTORS}
    return rate, rows


async def live(
    args: argparse.Namespace, load: Load, url: str
) -> tuple[float, list[Goodput], dict[str, Goodput], dict[str, float]]:
    asker = Asker(url, load, args.seed)
    await offer(asker, load, FIRST_RATE, 3, args.seed)  # warm-up
    trial = TRIAL_TIMEOUTS * load.timeout
    rate, trials = await sustainable(
        lambda rate: offer(asker, load, rate, trial, args.seed), FIRST_RATE, load.timeout
    )
    rows = {}
    for at, factor in enumerate(args.factors, 1):
        last = at == len(args.factors)
        seconds = args.last_seconds if last and args.last_seconds else args.seconds
        rows[f"{factor:g}"] = await offer(asker, load, factor * rate, seconds, args.seed)
        await asyncio.sleep(1)
    found = await crowd(asker, load, args.crowd) if args.crowd else {}
    return rate, trials, rows, found


def main() -> None:
    parser = new_parser("overload", __doc__)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each load")
    parser.add_argument("--last-seconds", type=float, help="of the last load, if not as the others")
    parser.add_argument("--factors", type=float, nargs="*", default=FACTORS)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--crowd", type=int, default=10_000, help="requests of one client at last")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console, report = console_of(110), Report("overload", args, "aiohttp")
    load = Load(args.prompt, args.output, args.simulate, args.timeout)
    give_way()
    trials: list[Goodput] = []
    crowded: dict[str, float] = {}
    if args.simulate:
        rate, rows = simulated(load, args.seconds, args.seed)
    else:
        with rl.Runtime(demo_model(), device="cpu", http_port=0) as runtime:
            rate, trials, rows, crowded = asyncio.run(live(args, load, str(runtime.url)))
    met = _print(console, report, rate, trials, rows, crowded)
    console.print(report.foreign_line())
    report.write()
    sys.exit(not met)


def _print(
    console: Console,
    report: Report,
    rate: float,
    trials: list[Goodput],
    rows: dict[str, Goodput],
    crowded: dict[str, float],
) -> bool:
    """Print whether goodput stays high."""
    table = {f"{name} x": asdict(one) for name, one in rows.items()}
    console.print(table_of(f"sustainable: {rate:.1f} requests/s", table, COLUMNS))
    target = aim(goodput_over_best(rate, list(rows.values())), ">=", 0.9)
    if target["value"] is None:
        console.print("the highest load was not the overload that it was to be: not compared")
    else:
        console.print(f"goodput at the highest load over the best: {target['value']:.2f}")
    if crowded:
        console.print(
            f"ten clients with a request each: {crowded['alone_s']:.2f} s, behind one with "
            f"{crowded['many']:,}: {crowded['behind_s']:.2f} s; all of the one's own: "
            f"{crowded['greedy_s']:.0f} s"
        )
    report.add("rate", rate)
    report.add("search", trials)
    report.add("loads", rows)
    report.add("crowd", crowded)
    report.add("goodput_over_best", target)
    return bool(target["met"])


if __name__ == "__main__":
    main()
