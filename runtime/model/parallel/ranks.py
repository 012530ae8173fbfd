"""Load each rank's part of a model, and lead the other ranks from rank 0.

`python -m rootlace.runtime.model.parallel.ranks` is a rank behind the first, started by `Workers`.
A rank computes rank 0's orders until its parent ends. Any failure ends the rank, and the engine.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.arrays import as_array, as_tensor, torch_dtype
from rootlace.kernels.interface import HostSampling
from rootlace.kernels.native.machine import read_cores, usable_cores
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime import processes
from rootlace.runtime.config import CacheConfig, ExecutorConfig, LogConfig
from rootlace.runtime.contracts.plan import ExecutorLost, StepPlan
from rootlace.runtime.model.automaton_table import Mask
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Progress
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.interface import Forward, Hidden
from rootlace.runtime.model.decoder.torch_decoder import ReferenceForward
from rootlace.runtime.model.executor.cpu_setup import LoadedModel, on_cpu
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.refusals import cores_of
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.lora import load_adapters, share_of
from rootlace.runtime.model.options import read_adapters
from rootlace.runtime.model.parallel.group import Group, decode, encode
from rootlace.runtime.model.parallel.shard import Shard
from rootlace.wire.errors import InternalError, RootlaceError, ServerUnavailable, from_code

# Rank model ---------------------------------------------------------------------------------------


@torch.inference_mode()
def load_rank(setup: ModelSetup, shard: Shard, ranks: Group) -> LoadedModel:
    """Load one rank's part of a model: weights, decoder and its part of the KV pool. The rank's
    kernels sample from logits in main memory. The `setup` has the whole model's configuration; its
    threads and memory are the rank's. Raises as `load_weights` and `on_cpu` do. Raises
    `UnsupportedModel` if the scales of a quantised weight cannot be divided among the ranks."""

    config, executor, device = setup.config, setup.executor, setup.device

    def weights_of(
        _: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> ModelWeights:
        return load_weights(config, dtype, device, progress, shard)

    published = config.published or config.spec
    whole = load_adapters(read_adapters(executor.adapters), published, setup.dtype, device)
    adapters = [share_of(one, shard) for one in whole]
    setup = replace(
        setup,
        config=replace(config, spec=shard.local_spec),
        weights_of=weights_of,
        adapters=adapters,
        ranks=ranks,
    )
    if device == "cpu":
        return on_cpu(setup)
    from rootlace.runtime.model.executor import device_steps, torch_setup

    model = device_steps.load(setup)
    blocks = ranks.agree(setup.choose_num_blocks())
    pool = torch_setup.allocate_on(
        torch.device(device), setup.config, blocks, setup.cache.block_size, setup.kv_dtype
    )
    forward = ReferenceForward(model.decoder, model.inputs, pool)
    return LoadedModel(setup, forward, pool, torch_setup.host_sampling(), "reference")


# Workers ------------------------------------------------------------------------------------------
#
# Start, watch and end the processes of the ranks behind the first, from rank 0.


LOADING, LOADED = "loading", "loaded"
LOADING_SECONDS = 1.0
"""Seconds between a worker's messages while it loads, sent by a separate thread."""
SILENCE_SECONDS = 120.0
"""Seconds of silence after which a worker counts as stopped; importing torch is silent, too."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """Configuration that a worker reads from its standard input. Dtype and device of `executor` are
    not "auto"; its threads are the worker's. `group`: the file by which ranks find each other.
    `cores`: the hardware threads to bind to; none: unbound. `log_format`: see `LogConfig`."""

    executor: ExecutorConfig
    cache: CacheConfig
    rank: int
    group: str
    cores: tuple[int, ...]
    log_format: Literal["text", "json"] = "text"


class WorkerMessage(msgspec.Struct, frozen=True):
    """Line of a worker's standard output: loading, loaded, or an error as `WorkerMessage(error's
    code, message)`."""

    what: str
    message: str = ""


class Workers:
    """Processes of the ranks behind the first. They end with their parent, or with this object."""

    def __init__(self, configs: Sequence[WorkerConfig]) -> None:
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        for config in configs:
            process = subprocess.Popen(
                processes.child_command("rootlace.runtime.model.parallel.ranks"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # the selector does not see data in a buffer
                start_new_session=True,
                env=processes.compute_environment(),
            )
            self._ranks[config.rank] = process
            assert process.stdin is not None
            process.stdin.write(processes.write_config(config))
            process.stdin.flush()

    def wait_until_loaded(self) -> None:
        """Wait for all ranks. Raises the typed error that a worker sent, or `ServerUnavailable` for
        a worker that ended without one, or stopped."""
        for rank, process in self._ranks.items():
            message = WorkerMessage(LOADING)
            while message.what == LOADING:
                message = _next_of(rank, process)
            if message.what != LOADED:
                raise from_code(message.what, message.message)

    def check(self) -> None:
        """Raise `ExecutorLost` if a worker has ended."""
        for rank, process in self._ranks.items():
            if process.poll() is not None:
                raise ExecutorLost(f"rank {rank} ended with code {process.returncode}")

    def pids(self) -> list[int]:
        """List the process ids of the ranks, for tests and tools."""
        return [process.pid for process in self._ranks.values()]

    def close(self) -> None:
        """End all workers, and wait for their end."""
        for process in self._ranks.values():
            process.kill()
        for process in self._ranks.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _next_of(rank: int, process: subprocess.Popen[bytes]) -> WorkerMessage:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(SILENCE_SECONDS):
            raise ServerUnavailable(
                f"rank {rank} said nothing for {SILENCE_SECONDS:g} s while it loaded the model"
            )
    line = process.stdout.readline()
    if not line:
        raise ServerUnavailable(f"rank {rank} ended with code {process.wait()}")
    return msgspec.json.decode(line, type=WorkerMessage)


# Leader -------------------------------------------------------------------------------------------


RUN, LOGITS = 1, 2
"""Orders of rank 0: run a plan; compute the logits of hidden states, of which a number of rows
follow."""

log = logging.getLogger(__name__)


class LeadingForward(msgspec.Struct, frozen=True):
    """Forward pass by all ranks: see `interface.Forward`. A failure in the middle of a step leaves
    the ranks at different places: then the executor is lost. `labels`: the number of the head's
    labels, if it has labels; every rank then has the whole head."""

    group: Group
    local: Forward
    workers: Workers
    block_size: int
    labels: int | None

    @property
    def vocab_size(self) -> int:
        return self.local.vocab_size

    def run(self, plan: StepPlan) -> Hidden:
        numbers = encode(plan, self.block_size)
        try:
            self.group.say(RUN, numbers)
            return self.local.run(plan)
        except Exception as error:
            raise self._lost(error) from error

    def logits(self, hidden: Hidden, masks: Sequence[Mask] = ()) -> np.ndarray:
        local = self.local
        if self.labels is not None:
            return local.logits(hidden)
        try:
            self.group.say(LOGITS, np.array([len(hidden)], np.int64).view(np.uint8))
            self.group.first(_as_tensor(hidden))
            parts = self.group.gathered(share_of_logits(local, hidden, self.group.count))
        except Exception as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=1)[:, : local.vocab_size].numpy()

    def vectors(self, hidden: Hidden) -> np.ndarray:
        return self.local.vectors(hidden)

    def best(self, hidden: Hidden, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        return None

    def _lost(self, error: Exception) -> ExecutorLost:
        self.workers.check()
        return ExecutorLost(f"a step of several ranks failed: {error!r}")


def _as_tensor(hidden: Hidden) -> torch.Tensor:
    return as_tensor(np.ascontiguousarray(hidden)) if isinstance(hidden, np.ndarray) else hidden


def share_of_logits(forward: Forward, hidden: Hidden, count: int) -> torch.Tensor:
    """Return a rank's logits, float32 [N, V / count] rounded up, padded at the end."""
    found = torch.from_numpy(forward.logits(hidden))
    missing = -(-forward.vocab_size // count) - found.shape[1]
    return torch.nn.functional.pad(found, (0, missing)) if missing else found


class LeadingSteps(PlainSteps):
    """Steps that fail once any rank has ended, also while the engine is idle."""

    def __init__(self, forward: LeadingForward, sampling: HostSampling, workers: Workers) -> None:
        super().__init__(forward, sampling)
        self.workers = workers

    def prepare(self) -> bool:
        self.workers.check()
        return False


def lead(setup: ModelSetup) -> tuple[LeadingSteps, LoadedModel]:
    """Load a model on `tensor_parallel` ranks, of which this process is the first. Return the steps
    of all, and this rank's part. Ranks divide the cores, or have a GPU each, from the setup's on.
    Raises as `load_rank` does on any rank."""
    spec, cache, device = setup.config.spec, setup.cache, setup.device
    count, executor = setup.executor.tensor_parallel, _share_of(setup.executor, setup.dtype)
    log.info("%d ranks, of %d threads each", count, executor.threads)
    if device != "cpu":
        log.warning("several ranks have not been tried on GPUs yet")
        torch.cuda.set_device(torch.device(device))  # kernels are launched on this device
    with tempfile.TemporaryDirectory(prefix="rootlace-ranks-") as folder:
        file = str(Path(folder) / "group")
        workers = Workers(
            [
                WorkerConfig(
                    dataclasses.replace(executor, device=_device_of(device, rank)),
                    *(cache, rank, file, _cores_of(rank, count), processes.format_in_force()),
                )
                for rank in range(1, count)
            ]
        )
        group = Group(Path(file), 0, count, torch.device(device), workers.wait_until_loaded)
        try:
            loaded = load_rank(replace(setup, executor=executor), Shard(spec, 0, count), group)
        except BaseException:
            workers.close()
            raise
    forward = LeadingForward(group, loaded.forward, workers, cache.block_size, spec.labels)
    return LeadingSteps(forward, loaded.sampling, workers), loaded


def _device_of(first: str, rank: int) -> str:
    return "cpu" if first == "cpu" else f"cuda:{torch.device(first).index + rank}"


def _share_of(executor: ExecutorConfig, dtype: np.dtype[Any]) -> ExecutorConfig:
    """Return a rank's configuration, with its part of threads and memory."""
    count, memory = executor.tensor_parallel, executor.kv_memory_bytes
    return dataclasses.replace(
        executor,
        dtype="bfloat16" if dtype == BFLOAT16 else "float32",
        threads=max((executor.threads or usable_cores()) // count, 1),
        kv_memory_bytes=None if memory is None else max(memory // count, 1),
        memory_share=executor.memory_share / count,
    )


def _cores_of(rank: int, count: int) -> tuple[int, ...]:
    """Return the hardware threads that a rank is bound to; none if a quota limits CPU time."""
    cores = read_cores()
    found = cores_of(cores.all, rank, count) if cores.quota is None else []
    return tuple(thread for core in found for thread in core.threads)


def main() -> int:
    """Run a rank; ends with its parent, or by a failure."""
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
    """Load, meet the other ranks, compute."""
    executor = config.executor
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    device = torch.device(executor.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = ModelConfig.read(executor.model, executor.allow_pickle, executor.ignore_config_keys)
    dtype = BFLOAT16 if executor.dtype == "bfloat16" else FLOAT32
    shard = Shard(model.spec, config.rank, executor.tensor_parallel)
    loading = threading.Event()

    def ready() -> None:
        loading.set()
        _send(WorkerMessage(LOADED))

    threading.Thread(target=_say_that_it_loads, args=(loading,), daemon=True).start()
    group = Group(Path(config.group), config.rank, shard.count, device, ready)
    loaded = load_rank(
        ModelSetup(model, executor, config.cache, dtype, executor.device), shard, group
    )
    width = model.spec.hidden_size
    none = torch.empty(0, width, dtype=torch_dtype(dtype), device=device)
    while True:
        follow(group, loaded, none)


def follow(group: Group, loaded: LoadedModel, none: torch.Tensor) -> None:
    """Carry out rank 0's next order. `none`: hidden states of no tokens [0, H]."""
    kind, numbers = group.hear()
    if kind == RUN:
        loaded.forward.run(decode(numbers))
        return
    assert kind == LOGITS
    rows = int(numbers.view("int64")[0])
    hidden = group.first(none.new_empty(rows, none.shape[1]))
    states = as_array(hidden) if loaded.kernels == "native" else hidden
    group.gathered(share_of_logits(loaded.forward, states, group.count))


def _say_that_it_loads(ended: threading.Event) -> None:
    while not ended.wait(LOADING_SECONDS):
        _send(WorkerMessage(LOADING))


def _send(message: WorkerMessage) -> None:
    # In one piece: two threads write lines.
    os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
