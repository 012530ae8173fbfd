"""A gateway process whose engine has no model.

The gateway is the real one. The process that it starts as its engine is this module again: the real
loop, scheduler and tree, each step taking a given time without using the processor. Its counters
have the CPU seconds of planning, of committing, and of making tokens up (`model_cpu_seconds`),
which is no part of the host's cost.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import zmq
from tokenizers import Tokenizer

from rootlace.runtime import processes
from rootlace.runtime.contracts.messages import (
    FromEngine,
    Ready,
    ToEngine,
    decode_to_engine,
    encode,
)
from rootlace.runtime.contracts.plan import Executor, StepPlan, StepResult
from rootlace.runtime.engine.client import EngineProcessConfig
from rootlace.runtime.engine.compiling import Compiler
from rootlace.runtime.engine.loop import EngineLoop
from rootlace.runtime.scheduler.scheduler import Scheduler

BLOCK_SIZE, NUM_BLOCKS = 16, 16384
CONTEXT_LENGTH = 16384
STEP_SECONDS = 0.002
ENGINE_MODULE = "rootlace.runtime.engine"


class NoModel:
    """An executor, one step at a time: a row's next token follows from its last one and its
    position. A step takes `STEP_SECONDS`, asleep, as on a device of its own."""

    overlaps = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        last = plan.row_start[1:][[sample.row for sample in plan.samples]] - 1
        mixed = plan.token_ids[last] * np.int64(7919) + plan.positions[last] * np.int64(104_729)
        tokens = (mixed % self.vocab_size).astype(np.int32)
        time.sleep(max(STEP_SECONDS - (time.perf_counter() - began), 0))
        return StepResult(tokens, [None] * len(tokens), [])


class Parts:
    """CPU seconds of the thread that parts of the loop take."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def watch(self, name: str, whose: object, method: str) -> None:
        """Count the time of a method as that of the part `name`."""
        function: Callable[..., Any] = getattr(whose, method)
        self._seconds[name] = 0.0

        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self._seconds[name] += time.thread_time() - started

        setattr(whose, method, timed)

    def stats(self) -> dict[str, float]:
        return {f"{name}_cpu_seconds": spent for name, spent in self._seconds.items()}


def gateway() -> int:
    """The gateway's own `main`, but for whom it starts as its engine."""
    from rootlace.runtime.gateway.__main__ import main

    real = processes.child_command

    def command(module: str) -> list[str]:
        if module != ENGINE_MODULE:
            return real(module)
        return [sys.executable, "-m", __spec__.name, "engine"]

    processes.child_command = command
    return main()


def engine() -> int:
    config = processes.read_config(sys.stdin.buffer, EngineProcessConfig)
    processes.call_when_parent_ends(sys.stdin.buffer, lambda: os._exit(0))
    tokenizer = Tokenizer.from_file(str(Path(config.engine.executor.model) / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    cache = replace(config.engine.cache, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    scheduler = Scheduler(config.engine.scheduler, cache, CONTEXT_LENGTH, vocab_size=vocab)
    executor, parts = NoModel(vocab), Parts()
    parts.watch("plan", scheduler, "plan")
    parts.watch("commit", scheduler, "commit")
    parts.watch("model", executor, "run")
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, config.inbox), (outbox, config.outbox)):
        socket.set_hwm(0)
        socket.connect(address)

    def receive(timeout_ms: int) -> list[ToEngine]:
        received: list[ToEngine] = []
        while inbox.poll(0 if received else timeout_ms):
            received.extend(decode_to_engine(inbox.recv()))
        return received

    def send(said: list[FromEngine]) -> None:
        outbox.send(encode(said))

    capacity = min(CONTEXT_LENGTH, NUM_BLOCKS * BLOCK_SIZE)
    sizes = (NUM_BLOCKS, BLOCK_SIZE, CONTEXT_LENGTH, capacity, vocab)
    send([Ready(os.getpid(), *sizes, "none", "none")])
    loop = EngineLoop(
        scheduler,
        cast("Executor", executor),
        cast("Compiler", None),  # nobody asks for constraints
        receive,
        send,
        executor_stats=parts.stats,
    )
    try:
        loop.run()
    finally:
        context.destroy(linger=1000)
    return 0


if __name__ == "__main__":
    sys.exit(engine() if sys.argv[1:] == ["engine"] else gateway())
