"""Can a tenant tell by time what another has cached? `python -m benchmarks.tenant_timing`.

A victim sends a prompt; then an attacker, with a `cache_salt` of its own, asks for a token behind
the same prompt, or behind another one of the same length that nobody has sent, in random order. If
times of the two kinds differ, the attacker learns what the victim sends. Printed are both medians,
and Mann-Whitney's U as z and p (two-sided, by the normal approximation). As a check that a
difference would be seen, the same is done within one namespace.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import asdict, dataclass

import aiohttp
import numpy as np
from rich.console import Console

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from rootlace.runtime.assets import demo_model

TOKENS = 1500


@dataclass(frozen=True)
class Finding:
    """Times to the token in ms: of prompts that the victim had sent, and of others."""

    attacker: str
    pairs: int
    sent: float
    unsent: float
    z: float
    p: float


def rank_test(first: list[float], second: list[float]) -> tuple[float, float]:
    """Return z and the two-sided p of Mann and Whitney's U, of numbers without ties."""
    n, m = len(first), len(second)
    ranks = np.argsort(np.argsort(first + second)) + 1.0
    u = ranks[:n].sum() - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return float(z), math.erfc(abs(z) / math.sqrt(2))


async def ask(http: aiohttp.ClientSession, prompt: list[int], salt: str) -> float:
    """Ask, and return milliseconds."""
    begun = time.perf_counter()
    body = {
        "input_ids": prompt,
        "extra_key": salt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }
    async with http.post("/generate", json=body) as reply:
        await reply.read()
        reply.raise_for_status()
    return (time.perf_counter() - begun) * 1000


async def measure(
    console: Console, url: str, vocabulary: int, pairs: int, attacker: str, seed: int
) -> Finding:
    dice = random.Random(seed)
    times: dict[bool, list[float]] = {True: [], False: []}
    kinds = [True, False] * (pairs + 2)
    dice.shuffle(kinds)
    async with aiohttp.ClientSession(url) as http:
        with progress_bar(console) as bar:
            for kind in bar.track(kinds, description=f"attacker {attacker}"):
                sent = [dice.randrange(10, vocabulary - 10) for _ in range(TOKENS)]
                unsent = [dice.randrange(10, vocabulary - 10) for _ in range(TOKENS)]
                await ask(http, sent, "victim")
                times[kind].append(await ask(http, sent if kind else unsent, attacker))
    z, p = rank_test(times[True][2:], times[False][2:])
    sent_ms, unsent_ms = (float(np.median(times[kind])) for kind in (True, False))
    return Finding(attacker, pairs, sent_ms, unsent_ms, z, p)


def main() -> None:
    parser = new_parser("tenant_timing", __doc__)
    parser.add_argument("--pairs", type=int, default=200, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = console_of(80)
    report = Report("tenant_timing", args)
    with rl.Runtime(demo_model(), device="cpu", http_port=0) as runtime:
        vocabulary = runtime.endpoint.model_info.vocab_size
        found = [
            asyncio.run(measure(console, str(runtime.url), vocabulary, args.pairs, salt, args.seed))
            for salt in ("stranger", "victim")
        ]
    columns = {
        "prompts": "{pairs}",
        "sent, ms": "{sent:.2f}",
        "not sent, ms": "{unsent:.2f}",
        "z": "{z:.2f}",
        "p": "{p:.3g}",
    }
    rows = {f"asked as {one.attacker}": asdict(one) for one in found}
    console.print(table_of("Time to a token behind a prompt that the victim sent", rows, columns))
    console.print(report.foreign_line())
    report.add("findings", found)
    report.write()


if __name__ == "__main__":
    main()
