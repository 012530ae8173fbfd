"""What a profiler's trace says about a device: when it was busy, and when it waited between steps.

A trace is the list of events of torch's profiler in the Chrome format: device events ("kernel",
"gpu_memcpy", "gpu_memset") carry the correlation number of the runtime call that enqueued them, and
all kernels of a graph's replay that of its launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    replays = _replays(device, launches)
    if replays:
        low, high = replays[0][0], max(end for _, end in replays)
    else:
        low, high = min(d[0] for d in device), max(d[1] for d in device)
    busy = union([(max(a, low), min(b, high)) for a, b, _ in device if b > low and a < high])
    gaps = [(a[1], b[0]) for a, b in itertools.pairwise(busy)]
    between = None
    if len(replays) > 1:
        waits = [(a[1], b[0]) for a, b in itertools.pairwise(replays) if b[0] > a[1]]
        between = sum(overlap(gap, wait) for gap, wait in _crossings(gaps, waits))
    return Idle(
        span=high - low,
        idle=sum(end - start for start, end in gaps),
        between=between,
        replays=len(replays),
        longest=max((end - start for start, end in gaps), default=0.0),
    )


def _replays(device: Sequence[tuple[float, float, int]], launches: set[int]) -> list[Interval]:
    """Beginning and end of every graph replay on the device, in order."""
    found: dict[int, Interval] = {}
    for start, end, correlation in device:
        if correlation in launches:
            low, high = found.get(correlation, (start, end))
            found[correlation] = min(low, start), max(high, end)
    return sorted(found.values())


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in disjoint intervals, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def overlap(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _crossings(
    gaps: Sequence[Interval], waits: Sequence[Interval]
) -> list[tuple[Interval, Interval]]:
    """Pairs that overlap; both lists are disjoint and in order."""
    pairs = []
    i = j = 0
    while i < len(gaps) and j < len(waits):
        if overlap(gaps[i], waits[j]) > 0:
            pairs.append((gaps[i], waits[j]))
        if gaps[i][1] < waits[j][1]:
            i += 1
        else:
            j += 1
    return pairs
