"""The engine process: `python -m rootlace.runtime.engine`, started by `EngineClient` only."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from rootlace.runtime import processes
from rootlace.runtime.config import SPECULATION_TOKENS, LogConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import Heartbeat, Ready, encode
from rootlace.runtime.engine.client.process_config import EngineProcessConfig
from rootlace.runtime.engine.core import EngineLoop, Pipes, collect_when_idle, connect, step_record
from rootlace.runtime.engine.process import Telling, loading_bar, loading_log
from rootlace.runtime.model.checkpoint.config import check_config
from rootlace.runtime.model.checkpoint.source import model_source
from rootlace.runtime.model.options import check_options, read_adapters
from rootlace.runtime.scheduler.masks import MaskThreads, StepMasks
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import InternalError, RootlaceError

if TYPE_CHECKING:
    from rootlace.runtime.engine.offload import OpenTiers

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
STEP_SECONDS = 0.25
"""Bound of a step on a CPU, where a step of `max_step_tokens` can take many seconds."""
SWITCH_SECONDS = 0.0005
"""Seconds for which a compiling thread keeps the interpreter once the loop wants it.

The loop releases the interpreter many times a step. With Python's default of 5 ms, a step beside a
compilation took several times as long.
"""


def main() -> int:
    """Run the engine; return 0 after a `Stop`, 1 if it cannot start (reason on stdout)."""
    processes.compete()
    gc.disable()  # a start makes many lasting objects and little garbage
    processes.set_up_logs(LogConfig(), "engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = processes.read_config(sys.stdin.buffer, EngineProcessConfig)
        processes.set_up_logs(
            config.engine.logs, "engine", config.replica if config.replicas > 1 else None
        )
        processes.call_when_parent_ends(sys.stdin.buffer, lambda: _abandon(config.socket_folder))
        serve(config)
    except RootlaceError as error:
        _print_error(error)
        return 1
    except Exception as error:
        log.exception("the engine could not go on")
        _print_error(InternalError(f"the engine failed: {error!r}"))
        return 1
    return 0


def serve(config: EngineProcessConfig) -> None:
    """Load the model, send `Ready`, run the loop; heartbeats are sent from the beginning."""
    context = zmq.Context()
    loops: list[EngineLoop] = []
    try:
        with heartbeat(context, config.outbox, loops):
            _serve(config, context, loops)
    finally:
        # The last messages must still leave; the gateway may be reading them right now.
        context.destroy(linger=1000)


def _told_loading(config: EngineProcessConfig) -> Callable[[str, float], None]:
    """Return a progress bar if the engine alone has a terminal and no machine-readable log."""
    alone = config.replicas == 1 and processes.format_in_force() == "text"
    return loading_bar(sys.stderr) if alone and sys.stderr.isatty() else loading_log()


def _serve(
    config: EngineProcessConfig, context: zmq.Context[zmq.Socket[bytes]], loops: list[EngineLoop]
) -> None:
    """Load the model and run the loop. `loops` receives the loop before it runs."""
    engine = config.engine
    executor = engine.executor
    checked = check_config(model_source(executor.model), executor.ignore_config_keys)
    if checked is not None:
        check_options(checked, executor, engine.cache)
        checked.source.release_texts()  # before further imports, which reuse the memory
    read_adapters(engine.executor.adapters)
    if config.replicas > 1:
        from rootlace.runtime.model.executor.refusals import take_share

        executor = take_share(engine.executor, config.replica, config.replicas)
        engine = dataclasses.replace(engine, executor=executor)
    # Late import: a refused model should not wait for it.
    from rootlace.runtime.model.executor.runner import ModelRunner

    sys.setswitchinterval(SWITCH_SECONDS)
    runner = ModelRunner.load(
        engine.executor,
        engine.cache,
        max_step_tokens=engine.scheduler.max_step_tokens,
        max_running=engine.scheduler.max_running,
        progress=_told_loading(config),
        config=checked,
    )
    overlap = runner.overlaps if engine.overlap is None else engine.overlap
    cache = dataclasses.replace(engine.cache, num_blocks=runner.num_blocks)
    filler = MaskThreads(engine.constraints.mask_threads)
    below: OpenTiers | None = None
    if cache.tiered or (cache.enabled and config.transfer is not None):
        from rootlace.runtime.engine.offload import open_tiers

        below = open_tiers(engine, runner, config.replicas, config.transfer, config.host_memory)
    scheduler = Scheduler(
        schedule_of(engine.scheduler, runner.device, runner.kernels),
        cache,
        runner.context_length,
        vocab_size=runner.vocab_size,
        masks=StepMasks(runner.vocab_size, filler),
        # With or without overlap, a device advances automata faster than the host could send masks.
        automata=overlap or runner.overlaps,
        labels=runner.config.spec.labels,
        adapters=runner.adapters,
        tiers=None if below is None else below.tiers,
        index_key=secrets.token_bytes(16),
        draft_model=runner.draft,
    )
    if below is not None:
        below.begin(scheduler, runner, cache.block_size)
    pipes = Pipes(context, config.inbox, config.outbox)
    capacity = min(runner.context_length, runner.num_blocks * cache.block_size)
    ready = Ready(
        pid=os.getpid(),
        num_blocks=runner.num_blocks,
        block_size=cache.block_size,
        context_length=runner.context_length,
        capacity_tokens=capacity,
        vocab_size=runner.vocab_size,
        device=runner.device,
        dtype=runner.dtype.name,
        hidden_size=runner.config.spec.hidden_size,
        labels=runner.config.spec.labels,
        adapters=runner.adapters,
        handed_slots=0 if below is None else below.handed_slots,
        handed_at=b"" if below is None else below.handed_at,
        adapter_contents={} if below is None else below.adapters,
    )
    record = step_record(Path(config.record), engine.scheduler.max_running)
    pipes.send([ready])
    # Late import: a refused model should not wait for it.
    from rootlace.runtime.engine.constraints import LateCompiler

    compiler = LateCompiler(runner, engine.constraints)
    collect_when_idle()
    jump_forward = engine.constraints.jump_forward
    loop = EngineLoop(
        scheduler,
        runner,
        compiler,
        pipes.receive,
        pipes.send,
        jump_forward,
        overlap,
        record=record,
        prepare=runner.prepare,
        executor_stats=runner.stats,
        telling=(
            Telling(scheduler.cache, scheduler.cost, bytes.fromhex(config.digest_key))
            if config.digest_key
            else None
        ),
        move=None if below is None else below.mover.move,
    )
    loops.append(loop)
    try:
        loop.run()
        if below is not None:
            below.close(scheduler)
    finally:
        compiler.close()
        filler.close()


def schedule_of(config: SchedulerConfig, device: str, kernels: str) -> SchedulerConfig:
    """Fill in settings left open in `config`, by the `device` type and the `kernels` that run."""
    if config.step_seconds is None and device == "cpu":
        config = dataclasses.replace(config, step_seconds=STEP_SECONDS)
    if config.speculation_tokens is None and kernels == "native":
        # Other kernels sum in an order that depends on the number of rows, and so on drafts.
        config = dataclasses.replace(config, speculation_tokens=SPECULATION_TOKENS)
    return config


@contextlib.contextmanager
def heartbeat(
    context: zmq.Context[zmq.Socket[bytes]], address: str, loops: list[EngineLoop]
) -> Iterator[None]:
    """Send heartbeats to `address` from a separate thread: a long step delays none of them."""
    ended = threading.Event()

    def run() -> None:
        with connect(context, zmq.PUSH, address) as socket:
            while True:
                socket.send(encode([loops[0].heartbeat() if loops else Heartbeat(0)]))
                if ended.wait(HEARTBEAT_SECONDS):
                    return

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _abandon(socket_folder: str) -> None:
    """Clean up and exit after the gateway disappeared."""
    shutil.rmtree(socket_folder, ignore_errors=True)
    os._exit(0)


def _print_error(error: RootlaceError) -> None:
    line = {"error": error.code, "message": str(error)}
    print(msgspec.json.encode(line).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
