"""What a profiler's trace says about a device: when it was busy, and when it waited between steps.

A trace is the list of events of torch's profiler in the Chrome format: device events ("kernel",
"gpu_memcpy", "gpu_memset") carry the correlation number of the runtime call that enqueued them, and
all kernels of a graph's replay carry that of its launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

DEVICE_KINDS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
GRAPH_LAUNCH = "cudaGraphLaunch"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Idle:
    """Microseconds. `between`: idle from the end of one graph's replay to the beginning of the next
    one's; None where there are no two replays. Shares are of `span`."""

    span: float
    idle: float
    between: float | None
    replays: int
    longest: float

    @property
    def share(self) -> float:
        return self.idle / self.span if self.span else 0.0

    @property
    def share_between(self) -> float | None:
        return None if self.between is None else self.between / self.span


def device_idle(events: Iterable[Mapping[str, Any]]) -> Idle:
    """From the first graph replay's beginning to the last one's end; without replays, from the
    first device event to the last. Raises ValueError if the device did nothing."""
    device: list[tuple[float, float, int]] = []
    launches: set[int] = set()
    for event in events:
        if event.get("ph") != "X":
            continue
        correlation = int(event.get("args", {}).get("correlation", -1))
        if event.get("cat") in DEVICE_KINDS:
            start = float(event["ts"])
            device.append((start, start + float(event["dur"]), correlation))
        elif str(event.get("name", "")).startswith(GRAPH_LAUNCH):
            launches.add(correlation)
    if not device:
        raise ValueError("the trace has no device events")
    of_graph: dict[int, list[Interval]] = {}
    for start, end, correlation in device:
        if correlation in launches:
            of_graph.setdefault(correlation, []).append((start, end))
    replays = [_around(parts) for parts in of_graph.values()]
    low, high = _around(replays or [(start, end) for start, end, _ in device])
    busy = union((max(a, low), min(b, high)) for a, b, _ in device if b > low and a < high)
    # Time that is neither busy nor inside a replay lies between replays.
    either = union([*busy, *replays])
    return Idle(
        span=high - low,
        idle=high - low - _total(busy),
        between=high - low - _total(either) if len(replays) > 1 else None,
        replays=len(replays),
        longest=max((after[0] - before[1] for before, after in pairwise(busy)), default=0.0),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in disjoint intervals, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _around(intervals: Iterable[Interval]) -> Interval:
    starts, ends = zip(*intervals, strict=True)
    return min(starts), max(ends)


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
