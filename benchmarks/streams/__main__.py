"""CPU cost of streams in the HTTP process: `python -m benchmarks.streams [--json FILE]`.

Many chats are streamed at once. Printed are CPU milliseconds per 100 tokens of a stream, in the
process that answers HTTP and in the engine's, without the costs of a request's beginning and end.
First our server, on an engine without a model whose steps take 2 and 25 ms; then, with `--vllm
PYTHON --model FOLDER`, ours and vLLM's on the same model, and the ratio.

The number of events is shown, too, because nearly all of the cost is per event.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import Report, aim, console_of, new_parser, table_of
from benchmarks.streams import servers
from benchmarks.streams.client import chat_body, read_streams
from rootlace.runtime.assets import demo_model

SHORT, LONG = 16, 208
"""Tokens of the streams of the two kinds of run."""
COLUMNS = {
    "server ms": "{server:.2f}",
    "engine ms": "{engine:.1f}",
    "events": "{events:.0f}",
    "us per event": "{per_event:.1f}",
    "request ms": "{request:.2f}",
    "tokens/s": "{rate:,.0f}",
}


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds for 100 tokens of a stream: `server` of the HTTP process, and
    `engine`. `events`: how many they came in, each at `per_event` CPU us of the server.
    `request`: CPU ms of the server for a request's beginning and end."""

    streams: int
    server: float
    engine: float
    events: float
    per_event: float
    request: float
    rate: float


def measure(server: servers.Server, streams: int, rounds: int) -> Cost:
    """Median of `rounds` of each figure."""
    _run(server, streams, SHORT)
    rows = [asdict(_round(server, streams)) for _ in range(rounds)]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return Cost(**{**medians, "streams": streams})


def _round(server: servers.Server, streams: int) -> Cost:
    short, few, _ = _run(server, streams, SHORT)
    long, many, seconds = _run(server, streams, LONG)
    hundreds = streams * (LONG - SHORT) / 100
    more = long - short
    events = (many - few) / hundreds
    spent = 1000 * more.front / hundreds
    return Cost(
        streams=streams,
        server=spent,
        engine=1000 * more.engine / hundreds,
        events=events,
        per_event=1000 * spent / events,
        request=1000 * short.front / streams - spent * SHORT / 100,
        rate=streams * LONG / seconds,
    )


def _run(server: servers.Server, streams: int, tokens: int) -> tuple[servers.Cpu, int, float]:
    """Return CPU time, events and seconds of so many streams of so many tokens."""
    bodies = [chat_body(server.model, number, tokens) for number in range(streams)]
    before, began = server.cpu(), time.perf_counter()
    found = asyncio.run(read_streams(server.url, bodies))
    seconds = time.perf_counter() - began
    time.sleep(0.05)  # work after the last byte counts, too
    if found.tokens != streams * tokens:
        raise RuntimeError(f"{found.tokens} tokens came, not {streams * tokens}")
    return server.cpu() - before, found.events, seconds


def main() -> None:
    parser = new_parser("streams", __doc__)
    parser.add_argument("--streams", type=int, default=256, help="at a time")
    parser.add_argument("--steps", nargs="*", type=float, default=(2.0, 25.0), help="in ms")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many counts")
    parser.add_argument("--model", type=Path, help="a model for our server and vLLM's")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of vLLM's environment")
    args = parser.parse_args()
    console, report = console_of(110), Report("streams", args, "aiohttp")
    streams, costs = args.streams, {}
    runs: dict[str, AbstractContextManager[servers.Server]] = {
        f"rootlace, steps of {step:g} ms": servers.without_model(demo_model(), step / 1000)
        for step in args.steps
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            runs[f"rootlace, {args.model.name}"] = servers.with_model(args.model, streams)
        if args.model and args.vllm:
            log = Path(folder) / "vllm.log"
            runs[f"vllm, {args.model.name}"] = servers.vllm(args.vllm, args.model, streams, log)
        for name, running in runs.items():
            with running as server:
                costs[name] = measure(server, streams, args.rounds)
    rows = {name: asdict(cost) for name, cost in costs.items()}
    console.print(table_of(f"CPU for 100 tokens, {streams} streams at a time", rows, COLUMNS))
    targets = {name: aim(cost.server, "<", 1, " ms") for name, cost in costs.items()}
    report.add("costs", rows)
    report.add("targets", {name: one for name, one in targets.items() if "vllm" not in name})
    if args.model and args.vllm:
        ours, theirs = list(costs.values())[-2:]
        ratio = theirs.server / ours.server
        console.print(f"vLLM's server takes {ratio:.1f} times the CPU of ours for 100 tokens")
        report.add("ratio", ratio)
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
