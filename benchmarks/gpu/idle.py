"""How much of the time the GPU waits for the host while the engine decodes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import InProcessEngine, grammar_compiler, greedy
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Report, Setting

PROFILED = (40, 100)
"""The turns of the engine's loop between which the profiler runs: all rows decode."""
DEVICE_KINDS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
GRAPH_LAUNCH = "cudaGraphLaunch"

Interval = tuple[float, float]


def measure(setting: Setting, report: Report) -> None:
    """The engine decodes 64 rows of the 1B shape; a stretch of it is profiled.

    The profiler makes the host slower and not the device, so the share found is an upper bound.
    On a CPU the same is done, but there is no device whose idling could be seen.
    """
    name, rows, new = ("smoke", 3, 10) if setting.smoke else ("1B", 64, 256)
    first, last = (1, 4) if setting.smoke else PROFILED
    with random_model(name, setting.device) as model:
        runner = model.runner_for(rows, 128 + new)
        compiler = grammar_compiler(model.config.spec.vocab_size)
        prompts = [[2 + (row + i) % 250 for i in range(128)] for row in range(rows)]
        activity = ProfilerActivity.CUDA if setting.on_gpu else ProfilerActivity.CPU
        modes = (None,) if setting.quick else (None, False)
        for overlap in report.progress(modes, "idle share"):
            with report.attempt(overlap=overlap is None, rows=rows) as case:
                with InProcessEngine(runner, compiler, rows, overlap) as engine:
                    engine.serve(prompts, greedy(new))  # graphs are captured
                    plain = engine.serve(prompts, greedy(new))
                    profiled = profile(activities=[activity])

                    def turn(number: int, profiled: profile = profiled) -> None:
                        if number == first:
                            profiled.start()
                        elif number == last:
                            setting.synchronize()
                            profiled.stop()

                    engine.serve(prompts, greedy(new), on_turn=turn)
                step = rows / plain.decode_tokens_per_second
                case |= {"step_us": step * 1e6, "tokens_per_second": plain.tokens_per_second}
                case |= _found(setting, profiled)


def _found(setting: Setting, profiled: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    if not setting.on_gpu:
        return {"idle_share": None, "idle_share_between_steps": None}
    idle = device_idle(events)
    return {
        "span_us": idle.span,
        "graph_replays": idle.replays,
        "idle_share": idle.idle / idle.span,
        "idle_share_between_steps": None if idle.between is None else idle.between / idle.span,
    }


@dataclass(frozen=True)
class Idle:
    """Microseconds. `between`: idle from the end of one graph's replay to the beginning of the next
    one's; None where there are no two replays."""

    span: float
    idle: float
    between: float | None
    replays: int


def device_idle(events: Iterable[Mapping[str, Any]]) -> Idle:
    """What a profiler's trace says about a device: when it was busy, and when it waited.

    `events` are in the Chrome format: those of the device carry the correlation number of the
    runtime call that enqueued them, and all kernels of a graph's replay that of its launch. Counted
    from the first replay's beginning to the last one's end; without replays, from the first device
    event to the last. Raises ValueError if the device did nothing.
    """
    device: list[tuple[Interval, int]] = []
    launches: set[int] = set()
    for event in events:
        if event.get("ph") != "X":
            continue
        correlation = int(event.get("args", {}).get("correlation", -1))
        if event.get("cat") in DEVICE_KINDS:
            start = float(event["ts"])
            device.append(((start, start + float(event["dur"])), correlation))
        elif str(event.get("name", "")).startswith(GRAPH_LAUNCH):
            launches.add(correlation)
    if not device:
        raise ValueError("the trace has no device events")
    of_graph: dict[int, list[Interval]] = {}
    for interval, correlation in device:
        if correlation in launches:
            of_graph.setdefault(correlation, []).append(interval)
    replays = [_around(parts) for parts in of_graph.values()]
    low, high = _around(replays or [interval for interval, _ in device])
    busy = union((max(a, low), min(b, high)) for (a, b), _ in device if b > low and a < high)
    # Time that is neither busy nor inside a replay lies between replays.
    either = union([*busy, *replays])
    return Idle(
        span=high - low,
        idle=high - low - _total(busy),
        between=high - low - _total(either) if len(replays) > 1 else None,
        replays=len(replays),
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
