"""What was seen of the server while it was asked: memory, counters, its engines' lives."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

import rootlace as rl
from benchmarks.soak.slope import Slope, slope_of
from benchmarks.soak.watched import traced_file
from rootlace.wire.errors import RootlaceError

MIB = 2.0**20
SERIES = {
    "gateway_rss_mib": "gateway: resident, MiB",
    "gateway_traced_mib": "gateway: Python's objects, MiB",
    "gateway_files": "gateway: open files",
    "engine_rss_mib": "engine: resident, MiB",
    "engine_traced_mib": "engine: Python's objects, MiB",
    "hit_rate": "share of prompts found in the cache",
}


@dataclass(frozen=True)
class Sample:
    """One look: `seconds` since the beginning, memory in MiB, and the engine's counters, which are
    empty where it did not answer."""

    seconds: float
    engine: int
    gateway_rss_mib: float
    gateway_traced_mib: float
    gateway_files: float
    engine_rss_mib: float
    engine_traced_mib: float
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """All looks. `killed`: the engines that were killed on purpose."""

    samples: list[Sample] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)

    @property
    def engines(self) -> list[int]:
        return list(dict.fromkeys(one.engine for one in self.samples if one.engine))

    def slopes(self, settle: float) -> dict[str, Slope | None]:
        """Of each series, without the first `settle` seconds of its process."""
        began = {engine: self._of(engine)[0].seconds for engine in self.engines}
        late = [one for one in self.samples if one.seconds > settle]
        lives = [
            [one for one in self._of(engine) if one.seconds > began[engine] + settle]
            for engine in self.engines
        ]
        found = {}
        for name in SERIES:
            if name == "hit_rate":
                series = [_hit_rates(life) for life in lives]
            else:
                parts = [late] if name.startswith("gateway") else lives
                series = [
                    ([one.seconds for one in part], [getattr(one, name) for one in part])
                    for part in parts
                ]
            found[name] = slope_of(series)
        return found

    def minutes(self) -> list[dict[str, Any]]:
        """Means of each minute, for pictures."""
        rows: dict[int, list[Sample]] = {}
        for one in self.samples:
            rows.setdefault(int(one.seconds // 60), []).append(one)
        return [_minute(number, part) for number, part in rows.items()]

    def _of(self, engine: int) -> list[Sample]:
        return [one for one in self.samples if one.engine == engine]


class Watcher:
    """Looks every `every` seconds."""

    def __init__(self, runtime: rl.Runtime, folder: Path, every: float) -> None:
        self._runtime = runtime
        self._folder = folder
        self._every = every
        self._began = time.monotonic()
        self.record = Record()

    def engine(self) -> psutil.Process | None:
        """None while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._runtime.pid).children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    async def kill_engine(self) -> None:
        """Once it works."""
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
            gateway_rss_mib=gateway.memory_info().rss / MIB,
            gateway_traced_mib=self._traced(gateway.pid),
            gateway_files=gateway.num_fds(),
            engine_rss_mib=_rss(engine),
            engine_traced_mib=self._traced(engine.pid) if engine else math.nan,
            counters=counters,
        )

    def _traced(self, pid: int) -> float:
        try:
            return int(traced_file(self._folder, pid).read_text()) / MIB
        except (OSError, ValueError):  # not there yet, or just being written
            return math.nan


def _rss(process: psutil.Process | None) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        return math.nan if process is None else process.memory_info().rss / MIB
    return math.nan


def _hit_rates(life: list[Sample]) -> tuple[list[float], list[float]]:
    """Of a minute each."""
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
    """Of the prompts that were computed between two looks at one engine."""
    cached, computed = (
        last.counters[name] - first.counters[name] for name in ("cached_tokens", "computed_tokens")
    )
    return cached / (cached + computed) if cached + computed else None


def _minute(number: int, part: list[Sample]) -> dict[str, Any]:
    rows = [asdict(one) for one in part]
    found: dict[str, Any] = {"minute": number, "engine": part[-1].engine}
    for name in SERIES:
        if name != "hit_rate":
            found[name] = _mean([row[name] for row in rows])
    for name in ("waiting", "running", "blocks_used", "blocks_free", "sessions"):
        known = [row["counters"][name] for row in rows if name in row["counters"]]
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
