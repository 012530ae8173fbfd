"""A gateway process whose engine has no model.

The gateway is the real one. The process that it starts as its engine is this module again: the real
loop, scheduler and tree on the simulated executor, each step taking a given time without using the
processor, as on a device of its own. `model_cpu_seconds` among its counters is what the simulation
itself took: it is no part of the host's cost.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

import zmq

from benchmarks.host_overhead.engine_loop import (
    BLOCK_SIZE,
    NoCompiler,
    NoOverlap,
    receive_from,
)
from benchmarks.simulated_executor import SimulatedExecutor
from rootlace.runtime import processes
from rootlace.runtime.contracts.messages import (
    FromEngine,
    Ready,
    encode,
)
from rootlace.runtime.contracts.plan import StepPlan, StepResult
from rootlace.runtime.engine.client import EngineProcessConfig
from rootlace.runtime.engine.loop import EngineLoop
from rootlace.runtime.scheduler.scheduler import Scheduler

NUM_BLOCKS = 16384
CONTEXT_LENGTH = 16384
ENGINE_MODULE = "rootlace.runtime.engine"


class Paced(NoOverlap):
    """In real time: `seconds` a step, asleep."""

    def __init__(self, executor: SimulatedExecutor, seconds: float) -> None:
        super().__init__(executor)
        self._seconds = seconds
        self.cpu = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        began, cpu = time.perf_counter(), time.thread_time()
        result = super().run(plan)
        time.sleep(max(self._seconds - (time.perf_counter() - began), 0))
        self.cpu += time.thread_time() - cpu
        return result


def gateway(vocab_size: str, step_seconds: str) -> int:
    """The gateway's own `main`, but for whom it starts as its engine."""
    from rootlace.runtime.gateway.__main__ import main

    real = processes.child_command

    def command(module: str) -> list[str]:
        if module != ENGINE_MODULE:
            return real(module)
        return [sys.executable, "-m", __spec__.name, "engine", vocab_size, step_seconds]

    processes.child_command = command
    return main()


def engine(vocab_size: str, step_seconds: str) -> int:
    config = processes.read_config(sys.stdin.buffer, EngineProcessConfig)
    processes.call_when_parent_ends(sys.stdin.buffer, lambda: os._exit(0))
    simulated = SimulatedExecutor(NUM_BLOCKS, BLOCK_SIZE, CONTEXT_LENGTH, int(vocab_size))
    executor = Paced(simulated, float(step_seconds))
    cache = config.engine.cache
    cache = type(cache)(BLOCK_SIZE, NUM_BLOCKS, cache.enabled)
    scheduler = Scheduler(
        config.engine.scheduler, cache, CONTEXT_LENGTH, vocab_size=simulated.vocab_size
    )
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, config.inbox), (outbox, config.outbox)):
        socket.set_hwm(0)
        socket.connect(address)

    def send(said: list[FromEngine]) -> None:
        outbox.send(encode(said))

    capacity = min(CONTEXT_LENGTH, NUM_BLOCKS * BLOCK_SIZE)
    ready = Ready(
        os.getpid(),
        NUM_BLOCKS,
        BLOCK_SIZE,
        CONTEXT_LENGTH,
        capacity,
        simulated.vocab_size,
        "none",
        "none",
    )
    send([ready])
    loop = EngineLoop(
        scheduler,
        executor,
        NoCompiler(),
        partial(receive_from, inbox),
        send,
        executor_stats=lambda: {"model_cpu_seconds": executor.cpu},
    )
    try:
        loop.run()
    finally:
        context.destroy(linger=1000)
    return 0


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    sys.exit(engine(*rest) if kind == "engine" else gateway(*rest))
