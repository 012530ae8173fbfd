"""Rank 0: it starts the other ranks, and has them compute their part of each of its steps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.native.cores import divided, read_cores
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import ExecutorLost, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import Progress
from rootlace.runtime.model.decoder.forward import ReferenceForward
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.parallel.group import Group
from rootlace.runtime.model.parallel.loaded_shard import load_shard
from rootlace.runtime.model.parallel.message import encode
from rootlace.runtime.model.parallel.workers import WorkerConfig, Workers
from rootlace.runtime.model.sampling.host_masks import Mask

RUN, LOGITS = 1, 2
"""What rank 0 has the others do: run a plan; find the logits of hidden states, so many rows of
which follow."""


class LeadingForward:
    """See `forward.Forward`: a step that all ranks compute. Hidden states and logits are in main
    memory. What fails in the middle of a step leaves the ranks at different places: then the
    executor is lost."""

    def __init__(
        self,
        group: Group,
        own: ReferenceForward,
        workers: Workers,
        block_size: int,
        labels: int | None,
    ) -> None:
        """`labels`: the head's, if it has such; every rank then has that head."""
        self._labels = labels
        self._group = group
        self._own = own
        self._workers = workers
        self._block_size = block_size

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    def run(self, plan: StepPlan) -> torch.Tensor:
        numbers = encode(plan, self._block_size)
        try:
            self._group.say(RUN, numbers)
            return self._own.run(plan).cpu()
        except Exception as error:
            raise self._lost(error) from error

    def logits(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> torch.Tensor:
        own = self._own
        hidden = hidden.to(own.device)
        if self._labels is not None:
            return own.logits(hidden).cpu()
        try:
            self._group.say(LOGITS, np.array([len(hidden)], np.int64).view(np.uint8))
            hidden = self._group.first(hidden)
            parts = self._group.gathered(share_of_logits(own, hidden, self._group.count))
        except Exception as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=1)[:, : own.vocab_size]

    def best(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        return None

    def _lost(self, error: Exception) -> ExecutorLost:
        self._workers.check()
        return ExecutorLost(f"a step of several ranks failed: {error!r}")


def share_of_logits(forward: ReferenceForward, hidden: torch.Tensor, count: int) -> torch.Tensor:
    """A rank's logits, with nothing in the places that its last tokens lack: float32 [N, V / count]
    rounded up."""
    found = forward.logits(hidden)
    missing = -(-forward.vocab_size // count) - found.shape[1]
    return torch.nn.functional.pad(found, (0, missing)) if missing else found


class LeadingSteps(PlainSteps):
    """Steps that end with any of the ranks, also while there is nothing to do."""

    def __init__(self, forward: LeadingForward, kernels: KernelSet, workers: Workers) -> None:
        super().__init__(forward, kernels)
        self.workers = workers

    def prepare(self) -> bool:
        self.workers.check()
        return False


@dataclass(frozen=True)
class LedModel:
    """A model on all of its ranks."""

    steps: LeadingSteps
    pool: torch.Tensor
    kernels: KernelSet
    context_length: int
    adapters: tuple[str, ...]


def lead(
    config: ModelConfig,
    executor: ExecutorConfig,
    cache: CacheConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> LedModel:
    """Load a model on `executor.tensor_parallel` ranks, of which this process is the first. They
    divide the cores, or have a GPU each, from `device` on. Raises as `load_shard` does on any of
    them."""
    count, cores = executor.tensor_parallel, read_cores()
    executor = replace(executor, dtype="bfloat16" if dtype == torch.bfloat16 else "float32")
    threads = max((executor.threads or cores.usable) // count, 1)
    bound: list[tuple[int, ...]] = [()] * count
    if executor.threads is None and cores.quota is None:
        bound = [tuple(core.threads[0] for core in own) for own in divided(cores, count)]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="rootlace-ranks-") as folder:
        file = Path(folder) / "group"
        workers = Workers(
            [
                WorkerConfig(
                    replace(executor, device=_device_of(device, rank)),
                    *(cache, rank, str(file), threads, bound[rank]),
                )
                for rank in range(1, count)
            ]
        )
        try:
            loaded = load_shard(config, executor, cache, 0, dtype, device, progress)
            workers.wait_until_loaded()
            group = Group(file, 0, count, device)
            own, pool = loaded.forward(group, group.least(loaded.blocks()))
        except BaseException:
            workers.close()
            raise
    forward = LeadingForward(group, own, workers, cache.block_size, config.spec.labels)
    # Logits are in main memory, whatever made them.
    steps = LeadingSteps(forward, REFERENCE, workers)
    names = tuple(one.name for one in loaded.adapters)
    return LedModel(steps, pool, loaded.kernels, loaded.rotary.context_length, names)


def _device_of(first: torch.device, rank: int) -> str:
    return "cpu" if first.type == "cpu" else f"cuda:{(first.index or 0) + rank}"
