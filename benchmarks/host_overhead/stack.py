"""The whole stack without a model: CPU time of engine, gateway and client, per step and request.

Gateway and engine are processes of their own, joined as they are in use; the engine has no model
and sleeps most of each step. All requests start together, so they decode together. Runs with short
and with long outputs tell what a step costs from what a request costs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import psutil

import rootlace as rl
from benchmarks.host_overhead import simulated_engine
from rootlace.client import runtime as gateway_process

SHORT, LONG = 16, 144
"""Tokens per request of the two kinds of run."""
MODES = (
    "programs",
    "programs, 1,000 ids",
    "programs, 8,000 ids",
    "programs, stop string",
    "programs, streamed",
    "http",
    "http, 1,000 ids",
    "http, streamed",
    "http, chat streamed",
)
PROCESSES = ("engine", "gateway", "client")


@dataclass(frozen=True)
class StackCost:
    """CPU microseconds per decode step of `rows` requests, and per request (start and end; the
    client's part of it included). `plan` and `commit` are parts of `engine`; `client` is this
    process, with HTTP aiohttp's."""

    mode: str
    rows: int
    plan: float
    commit: float
    engine: float
    gateway: float
    client: float
    total: float
    per_token: float
    engine_request: float
    gateway_request: float
    client_request: float


class Stack:
    """A runtime whose engine has no model, and a client in this process."""

    def __init__(self, runtime: rl.Runtime) -> None:
        assert runtime.url is not None
        self.gateway = runtime.pid
        self._engine = psutil.Process(runtime.pid).children()[0].pid
        self.url, self.endpoint = runtime.url, runtime.endpoint

    def written(self) -> int:
        """Return the bytes that the gateway wrote to files so far."""
        return int(psutil.Process(self.gateway).io_counters().write_chars)

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds so far of each part, without the simulation's."""
        status = self.endpoint.get_server_info()
        return {
            "plan": status["plan_cpu_seconds"],
            "commit": status["commit_cpu_seconds"],
            "engine": _cpu_seconds(self._engine) - status["model_cpu_seconds"],
            "gateway": _cpu_seconds(self.gateway),
            "client": time.process_time(),
        }


@contextmanager
def started(model: Path, step_seconds: float = 0.002, **options: Any) -> Iterator[Stack]:
    """Start a stack. `model`: a folder with a tokenizer. `options`: options of `rl.Runtime`."""
    with (
        patch.object(gateway_process, "GATEWAY_MODULE", simulated_engine.__name__),
        patch.dict(os.environ, {simulated_engine.STEP_VARIABLE: str(step_seconds)}),
        rl.Runtime(model, http_port=0, **options) as runtime,
    ):
        yield Stack(runtime)


def measure_stack(stack: Stack, mode: str, rows: int, rounds: int) -> StackCost:
    run = _runs(stack, mode)
    run(rows, SHORT)
    short, long = (_least(stack, run, rows, tokens, rounds) for tokens in (SHORT, LONG))
    step = {part: 1e6 * (long[part] - short[part]) / (LONG - SHORT) for part in long}
    per_request = {
        f"{part}_request": (1e6 * short[part] - SHORT * step[part]) / rows for part in PROCESSES
    }
    total = sum(step[part] for part in PROCESSES)
    return StackCost(mode, rows, **step, total=total, per_token=total / rows, **per_request)


def _least(
    stack: Stack, run: Callable[[int, int], None], rows: int, tokens: int, rounds: int
) -> dict[str, float]:
    """Return the CPU seconds of each part in its cheapest round."""
    spent = []
    for _ in range(rounds):
        before = stack.cpu()
        run(rows, tokens)
        time.sleep(0.01)  # the last messages are still under way
        after = stack.cpu()
        spent.append({part: after[part] - before[part] for part in after})
    return {part: min(one[part] for one in spent) for part in spent[0]}


def _runs(stack: Stack, mode: str) -> Callable[[int, int], None]:
    """Return a function that runs so many requests of so many tokens."""
    streamed = "streamed" in mode
    ids = int("".join(filter(str.isdigit, mode)) or 0)
    if mode.startswith("http"):
        chat = "chat" in mode
        return lambda rows, tokens: asyncio.run(_http(stack, rows, tokens, ids, streamed, chat))
    stop = "never said \x00" if "stop" in mode else None

    @rl.function
    async def program(s: Any, number: int, tokens: int) -> None:
        s += rl.ids(_ids(number, ids)) if ids else _text(number)
        s += rl.gen("answer", max_tokens=tokens, temperature=0, ignore_eos=True, stop=stop)

    async def one(number: int, tokens: int) -> None:
        state = await program.run_async(number, tokens, backend=stack.endpoint, stream=streamed)
        if streamed:
            async for _ in state.text_async_iter("answer"):
                pass

    async def together(rows: int, tokens: int) -> None:
        await asyncio.gather(*(one(number, tokens) for number in range(rows)))

    return lambda rows, tokens: asyncio.run(together(rows, tokens))


async def _http(stack: Stack, rows: int, tokens: int, ids: int, stream: bool, chat: bool) -> None:
    url = stack.url + ("/v1/chat/completions" if chat else "/v1/completions")

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        prompt: Any = _ids(number, ids) if ids else _text(number)
        body = {
            "model": "",
            **({"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        async with session.post(url, json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(await reply.text())
            await reply.read()

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one(session, number) for number in range(rows)))


def _text(number: int) -> str:
    return f"Some words that all programs begin with, then question {number}"


def _ids(number: int, count: int) -> list[int]:
    return [*(300 + i % 1000 for i in range(count)), number, number]


def _cpu_seconds(pid: int) -> float:
    """Return CPU seconds of all threads, to nanoseconds where the system reports them (Linux)."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return (
            sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        )
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
