"""Times of work on a device: medians, interleaved, past the caches.

On a GPU a call is timed by CUDA events around it, after the L2 cache was flushed by writing a
buffer twice its size. Where `captured`, the call is a replay of a CUDA graph of it, so that the
host's share of launching (tens of microseconds of Python) is not measured; the flush runs while the
replay is being enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.common import percentile

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""At least this much is written between two calls."""
WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    median: float
    low: float
    high: float
    repeats: int
    captured: bool = False

    def as_json(self) -> dict[str, float | bool]:
        """In microseconds: median, and the 10th and 90th percentile; whether a graph was timed."""
        return {
            "us": round(self.median * 1e6, 3),
            "p10_us": round(self.low * 1e6, 3),
            "p90_us": round(self.high * 1e6, 3),
            "captured": self.captured,
        }


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: torch.Tensor | None = None
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            size = max(2 * cache, FLUSH_BYTES)
            self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def one(self, call: Call, repeats: int, *, capture: bool = False) -> Timing:
        return self.compare({"": call}, repeats, capture=capture)[""]

    def compare(
        self, calls: Mapping[str, Call], repeats: int, *, capture: bool = False
    ) -> dict[str, Timing]:
        """Each call `repeats` times, in turns. `capture`: as graphs (on a GPU), where they can be
        captured."""
        if self._buffer is None:
            return _on_host(calls, repeats)
        runs = dict(calls)
        captured = set()
        for name, call in calls.items() if capture else ():
            try:
                runs[name] = _captured(call)
                captured.add(name)
            except RuntimeError:  # timed kernel by kernel, and marked so
                torch.cuda.synchronize(self._device)
        for run in runs.values():
            for _ in range(WARM_UPS):
                run()
        torch.cuda.synchronize(self._device)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                self._buffer.zero_()
                start.record()
                run()
                end.record()
                events[name].append((start, end))
            # A host that runs far ahead would hit the limit of enqueued work inside a measurement.
            torch.cuda.synchronize(self._device)
        return {
            name: _timing([a.elapsed_time(b) / 1e3 for a, b in pairs], name in captured)
            for name, pairs in events.items()
        }


def _captured(call: Call) -> Call:
    """A graph of `call`; what it allocates and returns lives in the graph's own memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _on_host(calls: Mapping[str, Call], repeats: int) -> dict[str, Timing]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: _timing(values, False) for name, values in times.items()}


def _timing(seconds: list[float], captured: bool) -> Timing:
    return Timing(
        median=percentile(seconds, 0.5),
        low=percentile(seconds, 0.1),
        high=percentile(seconds, 0.9),
        repeats=len(seconds),
        captured=captured,
    )


def synchronize(device: torch.device) -> None:
    """Wait until everything enqueued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
