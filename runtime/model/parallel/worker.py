"""A rank behind the first: `python -m rootlace.runtime.model.parallel.worker`.

`Workers` starts it. It computes what rank 0 says until its parent ends. Whatever fails ends it, and
with it the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from rootlace.runtime import processes
from rootlace.runtime.config import LogConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder.interface import Forward
from rootlace.runtime.model.parallel.group import Group, decode
from rootlace.runtime.model.parallel.leader import (
    LOADED,
    LOADING,
    LOADING_SECONDS,
    LOGITS,
    RUN,
    WorkerConfig,
    WorkerMessage,
    load_rank,
    share_of_logits,
)
from rootlace.runtime.model.parallel.shard import Shard
from rootlace.wire.errors import InternalError, RootlaceError

log = logging.getLogger(__name__)


def main() -> int:
    """Ends with its parent, else by what fails."""
    processes.end_with_parent()
    processes.set_up_logs(LogConfig(log_level="warning"), "engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = processes.read_config(sys.stdin.buffer, WorkerConfig)
        processes.set_up_logs(LogConfig("warning", config.log_format), "engine")
        processes.call_when_parent_ends(sys.stdin.buffer, lambda: os._exit(0))
        work(config)
    except RootlaceError as error:
        _send(WorkerMessage(error.code, str(error)))
    except Exception as error:
        log.exception("a rank of the model could not go on")
        _send(WorkerMessage(InternalError.code, f"a rank failed: {error!r}"))
    return 1


@torch.inference_mode()
def work(config: WorkerConfig) -> None:
    """Load, meet the others, compute."""
    executor = config.executor
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    device = torch.device(executor.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = ModelConfig.read(executor.model, executor.allow_pickle, executor.ignore_config_keys)
    dtype = getattr(torch, executor.dtype)
    shard = Shard(model.spec, config.rank, executor.tensor_parallel)
    loading = threading.Event()

    def ready() -> None:
        loading.set()
        _send(WorkerMessage(LOADED))

    threading.Thread(target=_say_that_it_loads, args=(loading,), daemon=True).start()
    group = Group(Path(config.group), config.rank, shard.count, device, ready)
    loaded = load_rank(model, executor, config.cache, shard, dtype, device, group)
    none = torch.empty(0, model.spec.hidden_size, dtype=dtype, device=device)
    while True:
        follow(group, loaded.forward, none)


def follow(group: Group, forward: Forward, none: torch.Tensor) -> None:
    """Do what rank 0 says next. `none`: hidden states of no tokens [0, H]."""
    kind, numbers = group.hear()
    if kind == RUN:
        forward.run(decode(numbers))
        return
    assert kind == LOGITS
    rows = int(numbers.view("int64")[0])
    hidden = group.first(none.new_empty(rows, none.shape[1]))
    group.gathered(share_of_logits(forward, hidden, group.count))


def _say_that_it_loads(ended: threading.Event) -> None:
    while not ended.wait(LOADING_SECONDS):
        _send(WorkerMessage(LOADING))


def _send(said: WorkerMessage) -> None:
    # In one piece: two threads say something.
    os.write(sys.stdout.fileno(), msgspec.json.encode(said) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
