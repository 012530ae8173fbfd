"""Engines that run the programs: Rootlace, and vLLM's server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

import rootlace as rl
from benchmarks.ideal_cache import IdealCache
from benchmarks.peers.completion_server import OpenAIServer
from benchmarks.peers.drive import PeerError
from benchmarks.peers.family import Family
from benchmarks.peers.vllm_server import vllm_server
from benchmarks.programs.client import Client, Encoder
from benchmarks.programs.ideal_client import IdealClient
from benchmarks.programs.vllm_client import VllmClient
from benchmarks.programs.workload import Row, Workload

KV_GIB = 1
"""Of each engine's cache: more than any workload fills."""
VLLM_OPTIONS = (
    *("--max-model-len", "8192", "--max-num-seqs", "64", "--max-num-batched-tokens", "4096"),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    # As our default; otherwise a random model would write white space until it is cut off.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)


@dataclass(frozen=True)
class Done:
    """Cost of a batch: seconds, and tokens. `computed`: prompt tokens that no cache had."""

    seconds: float
    prompt: int
    computed: int
    output: int


class Engine(Protocol):
    name: str

    def flush(self) -> None:
        """Forget every prefix."""

    def run(self, workload: Workload, rows: Sequence[Row]) -> Done:
        """Run all programs at once."""

    def awake(self) -> AbstractContextManager[None]:
        """Resume the engine for the block; outside it may be suspended."""


class Ours:
    """Programs of the DSL on a runtime of ours."""

    def __init__(self, name: str, runtime: rl.Runtime) -> None:
        self.name, self._runtime = name, runtime

    def flush(self) -> None:
        self._runtime.flush_cache()

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, workload: Workload, rows: Sequence[Row]) -> Done:
        before, start = self._runtime.get_server_info(), time.perf_counter()
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "backend": self._runtime}
        for state in workload.program.run_batch(rows, **options):
            if error := state.error():
                raise error
        seconds, after = time.perf_counter() - start, self._runtime.get_server_info()
        names = ("prompt_tokens", "cached_tokens", "output_tokens")
        prompt, cached, output = (after[name] - before[name] for name in names)
        return Done(seconds, prompt, prompt - cached, output)


class Vllm:
    """The same programs as concurrent requests to vLLM's server, which is suspended (SIGSTOP) while
    others run."""

    name = "vllm"

    def __init__(self, url: str, pid: int, encoder: Encoder) -> None:
        self._url, self._encoder, self.family = url, encoder, Family(pid)
        self._server = OpenAIServer(self.name, url)
        if not self._server.can_flush:
            raise PeerError("vLLM's cache cannot be emptied")
        self.family.pause()

    def flush(self) -> None:
        self._server.reset()

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.family.resume()
        try:
            yield
        finally:
            self.family.pause()

    def run(self, workload: Workload, rows: Sequence[Row]) -> Done:
        return asyncio.run(self._run(workload, rows))

    async def _run(self, workload: Workload, rows: Sequence[Row]) -> Done:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._url, connector=connector, timeout=aiohttp.ClientTimeout(600)
        ) as session:
            client = VllmClient(session, self._server.model, self._encoder)
            start = time.perf_counter()
            await all_at_once(workload, rows, client)
            seconds, usage = time.perf_counter() - start, client.usage
        return Done(seconds, usage.prompt, usage.prompt - usage.cached, usage.output)


async def all_at_once(workload: Workload, rows: Sequence[Row], client: Client) -> None:
    await asyncio.gather(*(workload.requests(client, *row) for row in rows))


def ideal_of(workload: Workload, rows: Sequence[Row], encoder: Encoder) -> IdealCache:
    """Return the hits of our requests of a batch in an unlimited cache."""
    cache = IdealCache()
    asyncio.run(all_at_once(workload, rows, IdealClient(encoder, cache)))
    return cache


@contextmanager
def ours(name: str, model: Path, threads: int, cache: bool) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": "cpu",
        "kv_memory_bytes": KV_GIB << 30,
    }
    with rl.Runtime(model, threads=threads, cache=cache, **options) as runtime:
        yield Ours(name, runtime)


@contextmanager
def vllm(python: Path, model: Path, threads: int, encoder: Encoder, log: Path) -> Iterator[Engine]:
    """Start vLLM's server. Raises PeerError."""
    options = ("--dtype", "bfloat16", *VLLM_OPTIONS)
    with vllm_server(python, model, log, threads, KV_GIB, options) as (url, pid):
        peer = Vllm(url, pid, encoder)
        try:
            yield peer
        finally:
            peer.family.resume()  # a suspended process cannot end
