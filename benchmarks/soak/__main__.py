"""Stability of a server under hours of overload:
`python -m benchmarks.soak --hours 1 [--json FILE] [--plot FILE.svg]`, or `make soak HOURS=1`.

A thousand clients, each with its own connection, send a server with the embedded model all kinds of
requests, and disconnect from some of these; programs fork; the engine is killed now and then
between a third and half of the time. The first engine's Python objects are counted, which takes
memory itself, so the memory of malloc and of the system is measured on later engines. Printed are
the slopes of memory and hit rate with their standard errors (by least squares on means of a minute,
without the first part of each process's life; the gateway's begin when the last engine has settled;
memory at equal numbers of waiting requests, running requests and sessions), the requests, and the
failures: answers that differ from earlier ones to the same question, errors, engines that died by
themselves, broken invariants of tree and pool, memory that surely grew. A failure ends with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, new_table
from benchmarks.soak import watched
from benchmarks.soak.load import Tally, running
from benchmarks.soak.plot import plot_soak
from benchmarks.soak.record import EXPLAINING, MIB, SERIES, Record, Sample, Watcher
from benchmarks.soak.slope import Slope
from rootlace.client import runtime as gateway_process
from rootlace.runtime.assets import demo_model
from rootlace.wire.errors import RootlaceError

KILLS = 5
"""Engines that are killed."""
KILLED_FROM, KILLED_TO = 1 / 3, 1 / 2
"""In this part of the time."""
KILL_SECONDS = 110.0
"""At least so much between two: after the fourth within five minutes no engine would come back."""
HOLD_SECONDS = 60.0
REST_SECONDS = 120.0
LINES_SECONDS = 180.0
"""So long a process may take to say which lines hold its memory."""
DRIFT = 0.02
"""Of the mean, per hour: what counts as flat."""


def main() -> None:
    parser = new_parser("soak", __doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=1000, help="connections over HTTP")
    parser.add_argument("--programs", type=int, default=8, help="at a time")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds a client thinks, mean")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    if args.kills and _between_kills(args) < KILL_SECONDS:
        parser.error(f"in {args.hours:g} hours there is no time for {args.kills} kills")
    console, report = console_of(100), Report("soak", args, "aiohttp")
    with tempfile.TemporaryDirectory() as folder:
        record, tally, rest = _soak(args, Path(folder), report)
        checks = watched.checks_file(Path(folder)).read_text()
        slopes = record.slopes(settle=3600 * args.hours / 12)
        faults = _faults(record, tally, rest, checks) + drifts(slopes)
        _print(console, record, tally, checks, faults, slopes)
        report.add("slopes", slopes)
        report.add("grown", _grown(Path(folder), record))
    report.add(
        "asked",
        dict(tally.done) | {"left": tally.left, "compared": tally.repeated, "blamed": tally.blamed},
    )
    report.add("failed", {"count": tally.failed, "first": tally.told})
    report.add("checks", {"done": len(checks), "failed": checks.count("!")})
    report.add("engines", {"all": len(record.engines), "killed": len(record.killed)})
    report.add("at_rest", rest)
    report.add("faults", faults)
    report.add("minutes", record.minutes())
    console.print(report.foreign_line())
    report.write()
    if args.plot:
        plot_soak(record.minutes(), args.plot)
    sys.exit(bool(faults))


def _between_kills(args: argparse.Namespace) -> float:
    """Draw the seconds between kills."""
    return 3600.0 * float(args.hours) * (KILLED_TO - KILLED_FROM) / int(args.kills)


def _soak(
    args: argparse.Namespace, folder: Path, report: Report
) -> tuple[Record, Tally, dict[str, Any]]:
    with (
        patch.object(gateway_process, "GATEWAY_MODULE", watched.__name__),
        patch.dict(os.environ, {watched.FOLDER_VARIABLE: str(folder)}),
        rl.Runtime(
            demo_model(),
            device="cpu",
            http_port=0,
            num_blocks=2048,
            hold_seconds=HOLD_SECONDS,
            log_file=folder / "log.txt",
            launch_timeout=1200,
        ) as runtime,
    ):
        watcher = Watcher(runtime, folder, every=5.0)
        tally = asyncio.run(_ask(args, runtime, watcher, folder))
        rest = _rest(runtime)
        report.add("logged", _logged((folder / "log.txt").read_text()))
    return watcher.record, tally, rest


async def _ask(
    args: argparse.Namespace, runtime: rl.Runtime, watcher: Watcher, folder: Path
) -> Tally:
    seconds = 3600 * args.hours
    end = time.monotonic() + seconds
    load = (args.clients, args.programs, args.pause, args.seed)
    async with running(str(runtime.url), runtime.endpoint, *load) as tally:
        watching = asyncio.ensure_future(watcher.run(lambda: time.monotonic() > end))
        telling = asyncio.ensure_future(_tell(watcher, tally))
        # Before measuring, because making the list takes memory.
        asyncio.get_running_loop().call_later(0.8 * seconds / 12, watched.ask_for_lines, folder, 1)
        if args.kills:
            await asyncio.sleep(seconds * KILLED_FROM)
            watched.no_more_tracing(folder)
        for _ in range(args.kills):
            await watcher.kill_engine()
            await asyncio.sleep(_between_kills(args))
        await watching
        telling.cancel()
        watched.ask_for_lines(folder, 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINES_SECONDS):
                while len(list(folder.glob("*.lines-2"))) < 2:  # gateway and engine
                    await asyncio.sleep(1)
    return tally


async def _tell(watcher: Watcher, tally: Tally) -> None:
    """Print a line a minute."""
    while True:
        await asyncio.sleep(60)
        if not watcher.record.samples:
            continue
        last = watcher.record.samples[-1]
        print(
            f"{last.seconds / 60:.0f} min: {sum(tally.done.values()):,} answers, "
            f"{tally.failed} failed, "
            f"gateway {_mib(last, 'gateway')}, engine {_mib(last, 'engine')} MiB, "
            f"{last.counters.get('waiting')} waiting",
            flush=True,
        )


def _mib(sample: Sample, part: str) -> str:
    return f"{sample.values.get(f'{part}_rss_mib', math.nan):.0f}"


def _rest(runtime: rl.Runtime) -> dict[str, Any]:
    """Return the counters once no client asks and nothing is held."""
    until = time.monotonic() + REST_SECONDS + HOLD_SECONDS
    found: dict[str, Any] = {}
    while time.monotonic() < until:
        try:
            found = runtime.endpoint.get_server_info()
        except RootlaceError:
            found = {}
        if found and not _left(found):
            break
        time.sleep(1)
    names = ("blocks_total", "blocks_free", "blocks_used", "blocks_evictable", "sessions")
    return {name: found.get(name) for name in (*names, "branches", "running", "waiting")}


def _left(found: dict[str, Any]) -> list[str]:
    """Return objects that are still held; the remaining session is this client's."""
    names = ("blocks_used", "branches", "running", "waiting")
    held = [name for name in names if found[name]]
    return held + (["sessions"] if found["sessions"] > 1 else [])


def _faults(record: Record, tally: Tally, rest: dict[str, Any], checks: str) -> list[str]:
    faults = []
    if tally.failed:
        faults.append(f"{tally.failed} answers were wrong or missing")
    if tally.blamed > len(record.killed):
        faults.append(f"{tally.blamed} requests were taken for killers of the engine")
    if "!" in checks or not checks:
        faults.append(f"{checks.count('!')} of {len(checks)} checks of tree and pool failed")
    died = len(record.engines) - 1 - len(record.killed)
    if died > 0:
        faults.append(f"{died} engines died by themselves")
    if rest["blocks_total"] is None:
        faults.append("the server did not answer at the end")
    elif left := _left(rest):
        faults.append(f"at rest there were still {', '.join(left)}")
    return faults


def drifts(slopes: dict[str, Slope | None]) -> list[str]:
    """Return series that surely (by three standard errors) grew, and hit rates that fell, by more
    than `DRIFT` of their mean in an hour; and series with too few minutes."""
    found = []
    for name, slope in slopes.items():
        if name.removesuffix("_mib").rpartition("_")[2] in EXPLAINING:
            continue
        if slope is None:
            found.append(f"too short to say whether it grew: {SERIES[name]}")
            continue
        worse = -slope.per_hour if name == "hit_rate" else slope.per_hour
        if worse - 3 * slope.error > DRIFT * slope.mean:
            found.append(f"{SERIES[name]}: {slope} per hour at {slope.mean:.4g}")
    return found


def _grown(folder: Path, record: Record) -> dict[str, dict[str, Any]]:
    """Return the bytes that lines of code held more at the end than after the beginning, the ten
    largest, of processes that lived throughout; and the MiB that malloc kept unused at the end, and
    returned on request."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.lines-2")):
        pid = int(file.name.partition(".")[0])
        new = watched.read_lines(file)
        mine = found["engine" if pid in record.engines else "gateway"] = {
            "trimmed_mib": round(new.trimmed / MIB, 1)
        }
        before = watched.lines_file(folder, pid, 1)
        if before.exists():
            old = watched.read_lines(before).sizes
            more = {_short(line): size - old.get(line, 0) for line, size in new.sizes.items()}
            mine["lines"] = dict(sorted(more.items(), key=lambda item: -item[1])[:10])
    return found


def _logged(text: str) -> dict[str, int]:
    """Return warnings and errors without their times, with their counts."""
    lines = [re.split(r" (ERROR|WARNING) ", line)[1:] for line in text.splitlines()]
    return dict(Counter(" ".join(line)[:160] for line in lines if line).most_common(20))


def _short(line: str) -> str:
    """Return the last folders of a path."""
    return "/".join(line.split("/")[-3:])


def _print(
    console: Console,
    record: Record,
    tally: Tally,
    checks: str,
    faults: list[str],
    slopes: dict[str, Slope | None],
) -> None:
    table = new_table("growth per hour ± standard error", "", "per hour", "mean", "minutes")
    for name, slope in slopes.items():
        cells = ("", "", "") if slope is None else (str(slope), f"{slope.mean:.4g}", slope.points)
        table.add_row(SERIES[name], *map(str, cells))
    console.print(table)
    asked = ", ".join(f"{name} {count:,}" for name, count in sorted(tally.done.items()))
    console.print(
        f"asked: {asked}; left {tally.left:,}; compared {tally.repeated:,}; blamed {tally.blamed}"
    )
    console.print(f"engines {len(record.engines)}, killed {len(record.killed)}")
    console.print(f"checks of tree and pool {len(checks)}, failed {checks.count('!')}")
    for line in [*faults, *tally.told]:
        console.print(f"! {line}", markup=False)


if __name__ == "__main__":
    main()
