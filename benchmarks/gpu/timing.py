"""Times of work on a device, in turns, with flushed caches.

On a GPU Triton's `do_bench` times a call by CUDA events, after a flush of the L2 cache. A
`captured` call is the replay of a CUDA graph, so that the host's launching (tens of microseconds of
Python) does not count; the flush runs while the replay is enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import percentile
from benchmarks.gpu.setting import Setting, describe, has_faulted

Call = Callable[[], object]

OURS = "rootlace"

ROUNDS = 4
"""Turns that calls take with each other."""
WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """`seconds` of each repetition; whether a graph was timed."""

    seconds: list[float]
    captured: bool = False

    @property
    def median(self) -> float:
        return percentile(self.seconds, 0.5)

    def as_json(self) -> dict[str, float | bool]:
        """Return microseconds: median, and the 10th and 90th percentile."""
        quantiles = {"us": 0.5, "p10_us": 0.1, "p90_us": 0.9}
        found = {name: percentile(self.seconds, q) * 1e6 for name, q in quantiles.items()}
        return {name: round(us, 3) for name, us in found.items()} | {"captured": self.captured}


def time_one(setting: Setting, call: Call, capture: bool = False) -> Timing:
    return time_in_turns(setting, {"": call}, capture)[""]


def time_in_turns(
    setting: Setting, calls: Mapping[str, Call], capture: bool = True
) -> dict[str, Timing]:
    """Time calls in turns. `capture`: as graphs, if calls can be captured."""
    if not setting.on_gpu:
        return {name: Timing([_on_host(call)]) for name, call in calls.items()}
    from triton.testing import do_bench

    runs, captured = dict(calls), set()
    for name, call in calls.items() if capture else ():
        try:
            runs[name] = _captured(call)
            captured.add(name)
        except RuntimeError:  # timed kernel by kernel, and marked so
            torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            each = do_bench(run, warmup=5, rep=setting.milliseconds / ROUNDS, return_mode="all")
            seconds[name] += [milliseconds / 1e3 for milliseconds in each]
    return {name: Timing(found, name in captured) for name, found in seconds.items()}


def time_rates(
    setting: Setting,
    makers: Mapping[str, Callable[[], Call]],
    amount: float,
    unit: str,
    ceiling: str,
) -> dict[str, Any]:
    """Return {"kernels": times of those that can run here, with their rate of `amount` per second
    and its share of the ceiling, or their error; "share": ours; "floor_us": time of `amount` at the
    ceiling}."""
    calls: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in makers.items():
        try:
            call = make()
            call()
            setting.synchronize()
            calls[name] = call
        except Exception as error:
            if has_faulted():
                raise
            found[name] = {"error": describe(error)}
    for name, timing in time_in_turns(setting, calls).items():
        rate = amount / timing.median
        found[name] = timing.as_json() | {unit: rate, "share": setting.share(rate, ceiling)}
    most = setting.ceilings.get(ceiling)
    floor = amount / most * 1e6 if most else None
    return {"kernels": found, "share": found[OURS].get("share"), "floor_us": floor}


def _captured(call: Call) -> Call:
    """Return a graph of `call`; the graph's own memory has its allocations and results."""
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


def _on_host(call: Call) -> float:
    """Check only that it runs."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
