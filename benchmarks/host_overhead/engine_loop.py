"""The engine's loop without a model: what a step costs beside it, part by part.

Loop, scheduler, tree and messages are the real ones, the executor is the simulated one, whose own
time is left out; messages come and go over real pipes. All times are CPU time, so that other
programs on the machine disturb them little.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import zmq

from benchmarks.simulated_executor import SimulatedExecutor
from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.constrained import Grammar
from rootlace.runtime.contracts.messages import (
    FromEngine,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
)
from rootlace.runtime.contracts.plan import Launched, SampleRow, StepPlan, StepResult
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.engine.loop import EngineLoop
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import Constraint, SamplingParams

BLOCK_SIZE = 16
QUIET_TOKENS = 32
"""As the gateway asks for them where nobody streams."""
VOCAB = 32_000
WARM_STEPS = 20
"""Of each run: left out."""


@dataclass(frozen=True)
class StepCost:
    """CPU microseconds beside the model per decode step (mean; best of the rounds), and of the step
    that admits and prefills all rows. `total` counts all threads of the process, ZeroMQ's too."""

    rows: int
    context: int
    streaming: bool
    receive: float
    plan: float
    commit: float
    send: float
    loop: float
    """The rest: updates as messages, and the loop itself."""
    total: float
    per_row: float
    prefill: float


class Stopwatch:
    """CPU nanoseconds of this thread inside wrapped functions, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.spent[name] = 0

        def timed(*args: Any) -> Any:
            started = time.thread_time_ns()
            try:
                return function(*args)
            finally:
                self.spent[name] += time.thread_time_ns() - started

        return timed


class NoOverlap:
    """The simulated executor, one step at a time."""

    overlaps = False

    def __init__(self, executor: SimulatedExecutor) -> None:
        self._executor = executor
        self.num_blocks = executor.num_blocks
        self.context_length = executor.context_length
        self.vocab_size = executor.vocab_size

    def run(self, plan: StepPlan) -> StepResult:
        return self._executor.run(plan)

    def launch(self, plan: StepPlan) -> NoReturn:
        raise NotImplementedError("steps do not overlap here")

    def sample(self, launched: Launched, samples: list[SampleRow]) -> NoReturn:
        raise NotImplementedError

    def collect(self, launched: Launched) -> NoReturn:
        raise NotImplementedError


class LeftOut(NoOverlap):
    """Notes how much CPU time passes between its steps."""

    def __init__(self, executor: SimulatedExecutor, ended: Callable[[], None]) -> None:
        super().__init__(executor)
        self._ended = ended
        self._left = (time.thread_time_ns(), time.process_time_ns())
        self.between: list[tuple[int, int]] = []
        """Nanoseconds before each step: of this thread, of the process."""

    def run(self, plan: StepPlan) -> StepResult:
        thread, process = self._left
        self.between.append((time.thread_time_ns() - thread, time.process_time_ns() - process))
        result = super().run(plan)
        self._ended()
        self._left = (time.thread_time_ns(), time.process_time_ns())
        return result


class NoCompiler:
    """Nothing here is constrained."""

    def cached(self, constraint: Constraint) -> Grammar | None:
        raise NotImplementedError

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        raise NotImplementedError


def measure_steps(
    rows: int, context: int, steps: int = 64, rounds: int = 3, streaming: bool = True
) -> StepCost:
    """Decode steps of `rows` requests of `context` tokens, half of which all share."""
    found = [_round(rows, context, steps, streaming) for _ in range(rounds)]
    best = min(found, key=lambda one: one.total)
    return StepCost(**{**asdict(best), "prefill": min(one.prefill for one in found)})


def _round(rows: int, context: int, steps: int, streaming: bool) -> StepCost:
    steps += WARM_STEPS
    blocks = (rows + 2) * ((context + steps) // BLOCK_SIZE + 2)
    simulated = SimulatedExecutor(blocks, BLOCK_SIZE, context + steps + 64, VOCAB)
    scheduler = Scheduler(
        SchedulerConfig(max_step_tokens=max(rows * context, rows), max_running=rows),
        CacheConfig(BLOCK_SIZE, blocks),
        simulated.context_length,
        vocab_size=VOCAB,
    )
    watch = Stopwatch()
    parts: list[dict[str, int]] = []
    executor = LeftOut(simulated, lambda: parts.append(dict(watch.spent)))
    scheduler.plan = watch.wrap("plan", scheduler.plan)  # type: ignore[method-assign]
    scheduler.commit = watch.wrap("commit", scheduler.commit)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as sockets:
        ends = [_pipe(sockets, Path(folder) / name) for name in ("inbox", "outbox")]
        (feed, inbox), (outbox, drain) = ends
        feed.send(encode(_requests(rows, context, steps, streaming)))

        def receive(timeout_ms: int) -> list[ToEngine]:
            received = receive_from(inbox, timeout_ms)
            return received if len(executor.between) <= steps else [Stop()]

        def send(said: list[FromEngine]) -> None:
            outbox.send(encode(said))

        EngineLoop(
            scheduler,
            executor,
            NoCompiler(),
            watch.wrap("receive", receive),
            watch.wrap("send", send),
        ).run()
        for socket in (feed, inbox, outbox, drain):
            socket.close(linger=0)
    return _summary(rows, context, streaming, executor.between, parts)


def _summary(
    rows: int,
    context: int,
    streaming: bool,
    between: list[tuple[int, int]],
    parts: list[dict[str, int]],
) -> StepCost:
    # `parts` was noted behind each step, `between` before it.
    first, last = WARM_STEPS, len(between) - 1
    count = last - first
    names = {name: (parts[last][name] - parts[first][name]) / count / 1000 for name in parts[last]}
    thread = statistics.fmean(one for one, _ in between[first + 1 :]) / 1000
    total = statistics.fmean(one for _, one in between[first + 1 :]) / 1000
    return StepCost(
        rows=rows,
        context=context,
        streaming=streaming,
        **names,
        loop=thread - sum(names.values()),
        total=total,
        per_row=total / rows,
        prefill=between[0][1] / 1000,
    )


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
