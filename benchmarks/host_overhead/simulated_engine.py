"""A gateway process whose engine has no model.

The gateway is the real one. It starts this module as its engine: the real engine on a runner whose
steps take a given time without using the processor. The counters have the CPU seconds of planning,
of committing, and of making up tokens (`model_cpu_seconds`), which is no cost of the host.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Tokenizer

from rootlace.runtime import processes
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import StepPlan, StepResult
from rootlace.runtime.scheduler.scheduler import Scheduler

STEP_VARIABLE = "SIMULATED_STEP_SECONDS"
"""The environment's variable that says how long a step takes."""
STEP_SECONDS = float(os.environ.get(STEP_VARIABLE, 0.002))
ENGINE_MODULE = "rootlace.runtime.engine"


class Parts:
    """CPU seconds of the thread in parts of the loop."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def watch(self, name: str, kind: type, method: str) -> None:
        """Count the time of a class's method as part `name`."""
        function: Callable[..., Any] = getattr(kind, method)
        self._seconds[name] = 0.0

        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self._seconds[name] += time.thread_time() - started

        setattr(kind, method, timed)

    def stats(self) -> dict[str, float]:
        return {f"{name}_cpu_seconds": spent for name, spent in self._seconds.items()}


class NoModel:
    """Stands for a `ModelRunner`, one step at a time: a row's next token depends on its last token
    and position. A step sleeps for `STEP_SECONDS`, as with a separate device."""

    overlaps = False
    device = kernels = "none"
    dtype = np.dtype(np.float32)
    num_blocks = context_length = 16384
    eos_token_ids = ()
    config = SimpleNamespace(spec=SimpleNamespace(labels=None, hidden_size=0))
    adapters = ()
    draft = None

    def __init__(self, vocab_size: int, parts: Parts) -> None:
        self.vocab_size = vocab_size
        self.stats = parts.stats

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        last = plan.row_start[1:][[sample.row for sample in plan.samples]] - 1
        mixed = plan.token_ids[last] * np.int64(7919) + plan.positions[last] * np.int64(104_729)
        tokens = (mixed % self.vocab_size).astype(np.int32)
        time.sleep(max(STEP_SECONDS - (time.perf_counter() - began), 0))
        return StepResult(tokens, [None] * len(tokens), [])

    def prepare(self) -> bool:
        return False


def gateway() -> int:
    """Run the gateway's own `main` with this module as its engine."""
    from rootlace.runtime.server.__main__ import main

    real = processes.child_command

    def command(module: str) -> list[str]:
        if module != ENGINE_MODULE:
            return real(module)
        return [sys.executable, "-m", __spec__.name, "engine"]

    with patch.object(processes, "child_command", command):
        return main()


def engine() -> int:
    """Run the engine's own `main` without a model."""
    from rootlace.runtime.engine.__main__ import main
    from rootlace.runtime.model.executor.runner import ModelRunner

    parts = Parts()
    for name, kind, method in (
        ("plan", Scheduler, "plan"),
        ("commit", Scheduler, "commit"),
        ("model", NoModel, "collect"),
    ):
        parts.watch(name, kind, method)

    def load(executor: ExecutorConfig, cache: CacheConfig, **_: int) -> NoModel:
        tokenizer = Tokenizer.from_file(str(Path(executor.model) / "tokenizer.json"))
        return NoModel(tokenizer.get_vocab_size(), parts)

    with patch.object(ModelRunner, "load", load):
        return main()


if __name__ == "__main__":
    sys.exit(engine() if sys.argv[1:] == ["engine"] else gateway())
