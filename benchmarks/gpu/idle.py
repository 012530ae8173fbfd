"""How much of the time the GPU waits for the host while the engine decodes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import InProcessEngine, grammar_compiler, greedy
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Report, Setting
from benchmarks.gpu.trace import device_idle

BLOCK_SIZE = 16
SKIPPED, PROFILED = 40, 60
"""Turns of the engine's loop before the profiler starts, and while it runs."""


def measure(setting: Setting, report: Report) -> None:
    """The engine decodes 64 rows of the 1B shape; a stretch of it is profiled.

    The profiler makes the host slower and not the device, so the share found is an upper bound.
    On a CPU the same is done, but there is no device whose idling could be seen.
    """
    name, rows, new = ("smoke", 3, 10) if setting.smoke else ("1B", 64, 256)
    skipped, profiled = (1, 3) if setting.smoke else (SKIPPED, PROFILED)
    with random_model(name, setting.device) as model:
        blocks = (rows + 2) * (-(-(128 + new) // BLOCK_SIZE) + 1)
        runner = model.runner(blocks, max_running=rows)
        compiler = grammar_compiler(model.config.spec.vocab_size)
        prompts = [[2 + (row + i) % 250 for i in range(128)] for row in range(rows)]
        modes = (None,) if setting.quick else (None, False)
        for overlap in report.progress(modes, "idle share"):
            with report.attempt(overlap=overlap is None):
                engine = InProcessEngine(runner, compiler, max_running=rows, overlap=overlap)
                try:
                    engine.serve(prompts, greedy(new))  # graphs are captured
                    plain = engine.serve(prompts, greedy(new))
                    window = _Window(setting.device, skipped, profiled)
                    engine.serve(prompts, greedy(new), on_turn=window.turn)
                finally:
                    engine.close()
                step = rows / plain.decode_tokens_per_second
                case = {"overlap": overlap is None, "rows": rows, "step_us": step * 1e6}
                case["tokens_per_second"] = plain.tokens_per_second
                report.add({**case, **window.found(step)})


class _Window:
    """Profiles the turns `skipped : skipped + profiled` of an engine's loop."""

    def __init__(self, device: torch.device, skipped: int, profiled: int) -> None:
        self._first, self._last = skipped, skipped + profiled
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CUDA] if self._on_gpu else [ProfilerActivity.CPU]
        self._profile = profile(activities=activities)
        self._events: list[dict[str, Any]] | None = None

    def turn(self, number: int) -> None:
        if number == self._first:
            self._profile.start()
        elif number == self._last:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._profile.stop()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(file))
                self._events = json.loads(file.read_text())["traceEvents"]

    def found(self, step: float) -> dict[str, Any]:
        """`step`: seconds that a step takes without the profiler. Its kernels take as long as in
        the profile, so what is left of it is idle."""
        if self._events is None:
            raise RuntimeError("the requests ended before the profiled turns were over")
        if not self._on_gpu:
            return {"idle_share": None, "idle_share_between_steps": None}
        idle = device_idle(self._events)
        unprofiled = None
        if idle.replays:
            unprofiled = 1 - (idle.span - idle.idle) / idle.replays / (step * 1e6)
        return {
            "span_us": idle.span,
            "graph_replays": idle.replays,
            "longest_gap_us": idle.longest,
            "idle_share": idle.share,
            "idle_share_between_steps": idle.share_between,
            "idle_share_without_profiler": unprofiled,
        }
