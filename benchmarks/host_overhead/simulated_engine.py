"""A gateway process whose engine has no model.

The gateway is the real one. The process that it starts as its engine is this module again: the real
loop, scheduler and tree, each step taking a given time without using the processor.
`model_cpu_seconds` among its counters is what making tokens up took: it is no part of the host's
cost.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import zmq
from tokenizers import Tokenizer

from benchmarks.host_overhead.engine_loop import BLOCK_SIZE, NoModel, new_loop, receive_from
from rootlace.runtime import processes
from rootlace.runtime.contracts.messages import FromEngine, Ready, encode
from rootlace.runtime.engine.client import EngineProcessConfig
from rootlace.runtime.scheduler.scheduler import Scheduler

NUM_BLOCKS = 16384
CONTEXT_LENGTH = 16384
STEP_SECONDS = 0.002
ENGINE_MODULE = "rootlace.runtime.engine"


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
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, config.inbox), (outbox, config.outbox)):
        socket.set_hwm(0)
        socket.connect(address)

    def send(said: list[FromEngine]) -> None:
        outbox.send(encode(said))

    capacity = min(CONTEXT_LENGTH, NUM_BLOCKS * BLOCK_SIZE)
    sizes = (NUM_BLOCKS, BLOCK_SIZE, CONTEXT_LENGTH, capacity, vocab)
    send([Ready(os.getpid(), *sizes, "none", "none")])
    loop = new_loop(scheduler, NoModel(vocab, STEP_SECONDS), partial(receive_from, inbox), send)
    try:
        loop.run()
    finally:
        context.destroy(linger=1000)
    return 0


if __name__ == "__main__":
    sys.exit(engine() if sys.argv[1:] == ["engine"] else gateway())
