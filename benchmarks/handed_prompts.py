"""Cost of computing prompts on another engine: `python -m benchmarks.handed_prompts`.

One of two engines computes prompts for the other and transfers them by each way. In turns, new
prompts are computed by the other engine, or by the engine that decodes. Printed are the medians of
the seconds until the first token, and the rate of putting and taking blocks of the model's size,
with checksums, without other work.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from rootlace.runtime.assets import demo_model
from rootlace.runtime.contracts.block_store import Transfer
from rootlace.runtime.offload.disk_store import checksum
from rootlace.runtime.offload.slot_store import AHEAD
from rootlace.runtime.processes import new_memory
from rootlace.runtime.transfer import Nixl, SharedMemory, Tcp

BLOCKS, SECONDS = 32, 1.0


@dataclass(frozen=True)
class Finding:
    """Milliseconds to the first token of `prompts` of each kind; `blocks` of `block_bytes` were
    transferred; rate of the way in 10^9 bytes a second."""

    way: str
    prompts: int
    apart: float
    alone: float
    blocks: int
    block_bytes: int
    gigabytes: float


async def first_tokens(url: str, prompts: list[list[int]]) -> tuple[list[float], list[float]]:
    """Run pairs of prompts: one computed apart, and one that is not, because it has a deadline."""
    took: tuple[list[float], list[float]] = [], []
    deadlines: tuple[dict[str, float], ...] = {}, {"timeout": 600.0}
    async with aiohttp.ClientSession(url) as http:
        for at, prompt in enumerate(prompts):
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            body = {"input_ids": prompt, "sampling_params": sampling}
            begun = time.perf_counter()
            async with http.post("/generate", json=body | deadlines[at % 2]) as reply:
                await reply.read()
                reply.raise_for_status()
            took[at % 2].append(1000 * (time.perf_counter() - begun))
    return took


def speed(way: str, block_bytes: int) -> float:
    """Transfer blocks repeatedly within this process; return 10^9 bytes/s."""
    memory = new_memory()
    ways: dict[str, Callable[[], Transfer]] = {
        "memory": lambda: SharedMemory(memory, block_bytes),
        "tcp": lambda: Tcp("127.0.0.1", block_bytes, BLOCKS),
        "nixl": lambda: Nixl(block_bytes, BLOCKS),
    }
    giver, taker = ways[way](), ways[way]()
    blocks = np.random.default_rng(0).integers(0, 256, (BLOCKS, block_bytes), np.uint8)
    _round(giver, taker, blocks)
    count, begun = 0, time.perf_counter()
    while (took := time.perf_counter() - begun) < SECONDS:
        _round(giver, taker, blocks)
        count += 1
    taker.close()
    giver.close()
    os.close(memory)
    return count * blocks.nbytes / took / 1e9


def _round(giver: Transfer, taker: Transfer, blocks: np.ndarray) -> None:
    into = np.empty(blocks.shape[1], np.uint8)
    for slot, block in enumerate(blocks):
        checksum(b"", block)
        giver.put(slot, block)
    for slot in range(BLOCKS):
        taker.expect(giver.address, range(slot, min(slot + AHEAD, BLOCKS)))
        taker.take(giver.address, slot, into)
        checksum(b"", into)


def measure(model: Path, way: str, tokens: int, pairs: int, **options: Any) -> Finding:
    dice = random.Random(0)
    two: dict[str, Any] = {
        "replicas": 2,
        "disaggregate": 1,
        "disaggregate_by": way,
        "disaggregate_from": 64,
    }
    with rl.Runtime(model, device="cpu", http_port=0, **two, **options) as runtime:
        vocabulary = runtime.endpoint.model_info.vocab_size
        prompts = [
            [dice.randrange(10, vocabulary - 10) for _ in range(tokens)]
            for _ in range(2 * pairs + 2)
        ]
        apart, alone = asyncio.run(first_tokens(str(runtime.url), prompts))
        status = runtime.get_server_info()
    given = [one["handed_given_blocks"] for one in status["replicas"]]
    written = sum(one["handed_written_bytes"] for one in status["replicas"])
    block_bytes = written // max(sum(given), 1)
    read = sum(one["handed_read_bytes"] for one in status["replicas"])
    taken = read // max(block_bytes, 1)
    found = speed(way, block_bytes)
    return Finding(way, pairs, median(apart[1:]), median(alone[1:]), taken, block_bytes, found)


def main() -> None:
    parser = new_parser("handed_prompts", __doc__)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--ways", default="memory,tcp", help="of memory, tcp, nixl")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--pairs", type=int, default=20, help="prompts of each kind")
    args = parser.parse_args()
    console = console_of(80)
    report = Report("handed_prompts", args)
    with progress_bar(console) as bar:
        found = [
            measure(args.model, way, args.tokens, args.pairs, num_blocks=1024)
            for way in bar.track(args.ways.split(","), description="ways")
        ]
    columns = {
        "apart, ms": "{apart:.1f}",
        "alone, ms": "{alone:.1f}",
        "taken": "{blocks}",
        "block, KiB": "{kib:.0f}",
        "GB/s": "{gigabytes:.2f}",
    }
    rows = {one.way: {**asdict(one), "kib": one.block_bytes / 1024} for one in found}
    console.print(table_of(f"First token behind {args.tokens} tokens", rows, columns))
    console.print(report.foreign_line())
    report.add("findings", found)
    report.write()


if __name__ == "__main__":
    main()
