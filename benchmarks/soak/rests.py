"""What does a server keep of what it answered? `python -m benchmarks.soak.rests [--json FILE]`.

Few clients ask a server with the embedded model for what `load` has, as fast as they can. After so
many answers they pause, and what the gateway and the engine hold is noted while nothing runs. So
what is under way does not count, and no clock: memory that each answer left would grow by the
answers.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, table_of
from benchmarks.soak import watched
from benchmarks.soak.load import Client, Tally
from benchmarks.soak.record import Sample, Watcher
from rootlace.client import runtime as gateway_process
from rootlace.runtime.assets import demo_model

SETTLE_SECONDS = 3 * watched.TELL_SECONDS
"""Behind the last answer; memory is told every `TELL_SECONDS`."""
SHOWN = {
    "gateway_held_mib": "gateway: malloc",
    "gateway_rss_mib": "gateway: resident",
    "gateway_files": "open files",
    "engine_held_mib": "engine: malloc",
    "engine_rss_mib": "engine: resident",
}


async def answers(url: str, tally: Tally, count: int, clients: int, seed: int) -> None:
    """So many clients get so many answers in all."""
    left = iter(range(count))

    async def one(number: int) -> None:
        client = Client(url, tally, random.Random(1000 * seed + number))
        async with client.connected():
            for _ in left:
                await client.ask()

    await asyncio.gather(*(one(number) for number in range(clients)))


def main() -> None:
    parser = new_parser("soak.rests", __doc__)
    parser.add_argument("--answers", type=int, default=10_000, help="between two rests")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=16)
    args = parser.parse_args()
    console, report = console_of(100), Report("rests", args)
    rests: list[Sample] = []
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watched.no_more_tracing(folder)
        with (
            patch.object(gateway_process, "GATEWAY_MODULE", watched.__name__),
            patch.dict(os.environ, {watched.FOLDER_VARIABLE: name}),
            rl.Runtime(
                demo_model(), device="cpu", http_port=0, num_blocks=2048, launch_timeout=1200
            ) as runtime,
        ):
            watcher = Watcher(runtime, folder, every=0)
            for number in range(args.rounds):
                asked = (str(runtime.url), tally, args.answers, args.clients, number)
                asyncio.run(answers(*asked))
                time.sleep(SETTLE_SECONDS)
                rests.append(watcher.look())
                print((number + 1) * args.answers, tally.failed, rests[-1].values, flush=True)
    rows = {
        f"{(number + 1) * args.answers:,}": {key: rest.values[key] for key in SHOWN}
        for number, rest in enumerate(rests)
    }
    columns = {title: f"{{{key}:,.1f}}" for key, title in SHOWN.items()}
    console.print(table_of("MiB after so many answers, at rest", rows, columns))
    console.print(f"{tally.failed} failed, {tally.repeated:,} compared")
    report.add("rests", rows)
    report.add("failed", {"count": tally.failed, "first": tally.told})
    report.add("asked", dict(tally.done))
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
