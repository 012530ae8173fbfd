"""The engine's loop without a model: what a step costs beside it, part by part.

Loop, scheduler, tree and messages are the real ones, and messages come and go over real pipes; the
executor makes tokens up, and its own time is left out. All times are CPU time, so that other
programs on the machine disturb them little.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import zmq

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import (
    FromEngine,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
)
from rootlace.runtime.contracts.plan import Executor, StepPlan, StepResult
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.engine.compiling import Compiler
from rootlace.runtime.engine.loop import EngineLoop
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import SamplingParams

BLOCK_SIZE = 16
QUIET_TOKENS = 32
"""As the gateway asks for them where nobody streams."""
VOCAB = 32_000
STEPS, WARM_STEPS = 64, 20
"""Steps of each run that are measured, and steps before them that are not."""


@dataclass(frozen=True)
class StepCost:
    """CPU microseconds beside the model per decode step (mean; best of the rounds), and of the step
    that admits and prefills all rows. `total` counts all threads of the process, ZeroMQ's too;
    `loop` is what is left of the loop's own thread: updates as messages, and the loop itself."""

    rows: int
    context: int
    streaming: bool
    receive: float
    plan: float
    commit: float
    send: float
    loop: float
    total: float
    per_row: float
    prefill: float


class NoModel:
    """An executor, one step at a time: a row's next token follows from its last one and its
    position. A step takes `seconds`, asleep, as on a device of its own."""

    overlaps = False

    def __init__(self, vocab_size: int, seconds: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self._seconds = seconds
        self.cpu = 0.0
        """CPU seconds that the steps took this thread."""

    def run(self, plan: StepPlan) -> StepResult:
        began, cpu = time.perf_counter(), time.thread_time()
        last = plan.row_start[1:][[sample.row for sample in plan.samples]] - 1
        mixed = plan.token_ids[last] * np.int64(7919) + plan.positions[last] * np.int64(104_729)
        tokens = (mixed % self.vocab_size).astype(np.int32)
        if self._seconds:
            time.sleep(max(self._seconds - (time.perf_counter() - began), 0))
        self.cpu += time.thread_time() - cpu
        return StepResult(tokens, [None] * len(tokens), [])


class Watched(NoModel):
    """Notes the CPU time that passes between its steps, and what parts of the loop took of it."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self._parts: Counter[str] = Counter()
        self._left = (time.thread_time_ns(), time.process_time_ns())
        self.between: list[tuple[int, int, Counter[str]]] = []
        """Nanoseconds before each step: of this thread, of the process, and of the parts."""

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time noted as that of the part `name`."""

        def timed(*args: Any) -> Any:
            started = time.thread_time_ns()
            try:
                return function(*args)
            finally:
                self._parts[name] += time.thread_time_ns() - started

        return timed

    def run(self, plan: StepPlan) -> StepResult:
        now = (time.thread_time_ns(), time.process_time_ns())
        self.between.append((now[0] - self._left[0], now[1] - self._left[1], self._parts))
        self._parts = Counter()
        result = super().run(plan)
        self._left = (time.thread_time_ns(), time.process_time_ns())
        return result


def new_loop(
    scheduler: Scheduler,
    executor: NoModel,
    receive: Callable[[int], list[ToEngine]],
    send: Callable[[list[FromEngine]], None],
) -> EngineLoop:
    """The real loop on an executor that never overlaps, for requests without constraints."""
    return EngineLoop(
        scheduler,
        cast("Executor", executor),
        cast("Compiler", None),
        receive,
        send,
        executor_stats=lambda: {"model_cpu_seconds": executor.cpu},
    )


def measure_steps(
    rows: int, context: int, steps: int = STEPS, rounds: int = 3, streaming: bool = True
) -> StepCost:
    """Decode steps of `rows` requests of `context` tokens, half of which all share."""
    found = [_round(rows, context, steps + WARM_STEPS, streaming) for _ in range(rounds)]
    best = min(found, key=lambda one: one["total"])
    best["prefill"] = min(one["prefill"] for one in found)
    return StepCost(rows, context, streaming, per_row=best["total"] / rows, **best)


def _round(rows: int, context: int, steps: int, streaming: bool) -> dict[str, float]:
    blocks = (rows + 2) * ((context + steps) // BLOCK_SIZE + 2)
    scheduler = Scheduler(
        SchedulerConfig(max_step_tokens=max(rows * context, rows), max_running=rows),
        CacheConfig(BLOCK_SIZE, blocks),
        context + steps + 64,
        vocab_size=VOCAB,
    )
    executor = Watched()
    for name in ("plan", "commit"):
        setattr(scheduler, name, executor.part(name, getattr(scheduler, name)))
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as sockets:
        ends = [_pipe(sockets, Path(folder) / name) for name in ("inbox", "outbox")]
        (feed, inbox), (outbox, drain) = ends
        feed.send(encode(_requests(rows, context, steps, streaming)))

        def receive(timeout_ms: int) -> list[ToEngine]:
            received = receive_from(inbox, timeout_ms)
            return received if len(executor.between) <= steps else [Stop()]

        def send(said: list[FromEngine]) -> None:
            outbox.send(encode(said))

        new_loop(
            scheduler, executor, executor.part("receive", receive), executor.part("send", send)
        ).run()
        for socket in (feed, inbox, outbox, drain):
            socket.close(linger=0)
    # The first step prefills; nothing but decoding lies between the later ones.
    measured = executor.between[WARM_STEPS + 1 :]
    parts = {
        name: fmean(parts[name] for _, _, parts in measured) / 1000
        for name in ("receive", "plan", "commit", "send")
    }
    return {
        **parts,
        "loop": fmean(thread for thread, _, _ in measured) / 1000 - sum(parts.values()),
        "total": fmean(process for _, process, _ in measured) / 1000,
        "prefill": executor.between[0][1] / 1000,
    }


def _requests(rows: int, context: int, steps: int, streaming: bool) -> list[ToEngine]:
    random = np.random.default_rng(0)
    shared = random.integers(0, VOCAB, context // 2, dtype=np.int32)
    params = SamplingParams(temperature=0, max_tokens=steps + 32, seed=0, ignore_eos=True)
    requests: list[ToEngine] = []
    for rid in range(rows):
        own = random.integers(0, VOCAB, context - len(shared), dtype=np.int32)
        prompt = np.concatenate((shared, own))
        requests.append(Request(rid, prompt, params, emit_every=1 if streaming else QUIET_TOKENS))
    return requests


def _pipe(
    context: zmq.Context[zmq.Socket[bytes]], path: Path
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        socket.set_hwm(0)
    pull.bind(f"ipc://{path}")
    push.connect(f"ipc://{path}")
    return push, pull


def receive_from(inbox: zmq.Socket[bytes], timeout_ms: int) -> list[ToEngine]:
    """Wait for messages, and take all that are there."""
    received: list[ToEngine] = []
    while inbox.poll(0 if received else timeout_ms):
        received.extend(decode_to_engine(inbox.recv()))
    return received
