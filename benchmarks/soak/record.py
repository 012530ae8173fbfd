"""Samples of the server during a soak: memory, counters, its engines' lives."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

import rootlace as rl
from benchmarks.soak.slope import Series, Slope, slope_of
from benchmarks.soak.watched import memory_file
from rootlace.wire.errors import RootlaceError

MIB = 2.0**20
MEMORY = {
    "rss": "resident",
    "mapped": "resident, of files",
    "held": "handed out by malloc",
    "kept": "kept by malloc for later",
    "traced": "Python's objects",
    "tracing": "the tables that count these",
}
"""What is known of a process's memory. These overlap: what malloc hands out has Python's larger
objects and the tables in it; small objects lie elsewhere."""
EXPLAINING = ("mapped", "kept", "tracing")
"""Those of them that need not be flat by themselves: they say what else grew."""
COUNTED = ("engine_traced_mib", "engine_tracing_mib")
SERIES = {
    f"{part}_{name}_mib": f"{part}: {what}, MiB"
    for part in ("gateway", "engine")
    for name, what in MEMORY.items()
} | {
    "gateway_files": "gateway: open files",
    "hit_rate": "share of prompts found in the cache",
}

LOADS = ("waiting", "running", "sessions")
"""The engine's counters of what is under way."""


@dataclass(frozen=True)
class Sample:
    """One sample: `seconds` since the beginning, the engine's process, values of `SERIES`, and the
    engine's counters, empty if it did not answer."""

    seconds: float
    engine: int
    values: dict[str, float]
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """All samples. `killed`: engines that were killed on purpose."""

    samples: list[Sample] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)

    @property
    def engines(self) -> list[int]:
        return list(dict.fromkeys(one.engine for one in self.samples if one.engine))

    def slopes(self, settle: float) -> dict[str, Slope | None]:
        """Return the slope of each series, without the first `settle` seconds of its process.
        Engines with counted objects give the growth of these, others (if any) of all else. The
        gateway settles after the last engine's start: without an engine, its memory rises for a
        thousand waiting requests, and Python keeps that. Memory is compared at equal `LOADS`,
        because a busy machine has more requests under way."""
        began = {engine: self._of(engine)[0].seconds for engine in self.engines}
        last = max(began.values(), default=0.0)
        late = [one for one in self.samples if one.seconds > last + settle]
        lives = [
            [one for one in self._of(engine) if one.seconds > began[engine] + settle]
            for engine in self.engines
        ]
        plain = [life for life in lives if not any(_is_traced(one) for one in life)]
        found = {}
        for name in SERIES:
            if name != "hit_rate" and not any(name in one.values for one in self.samples):
                continue  # the system does not report it
            if name == "hit_rate":
                series: list[Series] = [_hit_rates(life) for life in lives]
            else:
                if name.startswith("gateway"):
                    parts = [late]
                else:
                    parts = lives if name in COUNTED else plain or lives
                series = [
                    (
                        [one.seconds for one in part],
                        [one.values.get(name, math.nan) for one in part],
                        *([one.counters.get(load, math.nan) for one in part] for load in LOADS),
                    )
                    for part in parts
                ]
            found[name] = slope_of(series)
        return found

    def minutes(self) -> list[dict[str, Any]]:
        """Return means of each minute, for plots."""
        rows: dict[int, list[Sample]] = {}
        for one in self.samples:
            rows.setdefault(int(one.seconds // 60), []).append(one)
        return [_minute(number, part) for number, part in rows.items()]

    def _of(self, engine: int) -> list[Sample]:
        return [one for one in self.samples if one.engine == engine]


class Watcher:
    """Takes a sample every `every` seconds."""

    def __init__(self, runtime: rl.Runtime, folder: Path, every: float) -> None:
        self._runtime = runtime
        self._folder = folder
        self._every = every
        self._began = time.monotonic()
        self.record = Record()

    def engine(self) -> psutil.Process | None:
        """Return the engine's process; None without an engine."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._runtime.pid).children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    async def kill_engine(self) -> None:
        """Kill the engine once it works."""
        while not (self.record.samples and self.record.samples[-1].engine):
            await asyncio.sleep(1)
        engine = psutil.Process(self.record.samples[-1].engine)
        self.record.killed.append(engine.pid)
        engine.kill()

    async def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.record.samples.append(await asyncio.to_thread(self._look))
            await asyncio.sleep(self._every)

    def _look(self) -> Sample:
        gateway, engine = psutil.Process(self._runtime.pid), self.engine()
        counters: dict[str, Any] = {}
        with contextlib.suppress(RootlaceError):
            counters = self._runtime.endpoint.get_server_info()
        counters.pop("model", None)
        return Sample(
            seconds=time.monotonic() - self._began,
            engine=engine.pid if engine and counters else 0,
            values={
                **self._memory("gateway", gateway),
                **({} if engine is None else self._memory("engine", engine)),
                "gateway_files": gateway.num_fds(),
            },
            counters=counters,
        )

    def _memory(self, part: str, process: psutil.Process) -> dict[str, float]:
        """Return the values of `MEMORY` that are available."""
        found: dict[str, float] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):  # not there, or being written
            found = msgspec.json.decode(memory_file(self._folder, process.pid).read_bytes())
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            found["rss"] = process.memory_info().rss
            found["mapped"] = found["rss"] - _anonymous(process.pid)
        return {f"{part}_{name}_mib": value / MIB for name, value in found.items()}


def _is_traced(one: Sample) -> bool:
    return any(name in one.values for name in COUNTED)


def _anonymous(pid: int) -> int:
    """Return resident bytes outside files. Raises OSError if the system does not report them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise ProcessLookupError(pid)


def _hit_rates(life: list[Sample]) -> tuple[list[float], list[float]]:
    """Return the hit rate of each minute."""
    times, rates = [], []
    before = None
    for one in life:
        if not one.counters:
            continue
        if before is None:
            before = one
        elif one.seconds - before.seconds >= 60:
            rate = _hit_rate(before, one)
            if rate is not None:
                times.append(one.seconds)
                rates.append(rate)
            before = one
    return times, rates


def _hit_rate(first: Sample, last: Sample) -> float | None:
    """Return the hit rate of the prompts between two samples of one engine."""
    cached, computed = (
        last.counters[name] - first.counters[name] for name in ("cached_tokens", "computed_tokens")
    )
    return cached / (cached + computed) if cached + computed else None


def _minute(number: int, part: list[Sample]) -> dict[str, Any]:
    found: dict[str, Any] = {"minute": number, "engine": part[-1].engine}
    for name in SERIES:
        if name != "hit_rate":
            found[name] = _mean([one.values.get(name, math.nan) for one in part])
    for name in ("waiting", "running", "blocks_used", "blocks_free", "sessions"):
        known = [one.counters[name] for one in part if name in one.counters]
        found[name] = _mean(known)
    known = [one for one in part if one.counters and one.engine == part[-1].engine]
    if len(known) > 1:
        first, last = known[0].counters, known[-1].counters
        found["hit_rate"] = _hit_rate(known[0], known[-1])
        seconds = known[-1].seconds - known[0].seconds
        names = ("cached_tokens", "computed_tokens", "output_tokens")
        tokens = sum(last[name] - first[name] for name in names)
        found["tokens_per_second"] = round(tokens / seconds)
        busy = last["engine_busy_seconds"] - first["engine_busy_seconds"]
        found["busy"] = round(busy / seconds, 3)
    return found


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return round(sum(known) / len(known), 3) if known else None
