"""What one of several engines of a machine takes of it."""

from __future__ import annotations

import dataclasses
import logging
import os

from rootlace.kernels.native.cores import divided, read_cores
from rootlace.runtime.config import ExecutorConfig
from rootlace.wire.errors import InvalidRequest

log = logging.getLogger(__name__)


def take_share(executor: ExecutorConfig, replica: int, replicas: int) -> ExecutorConfig:
    """The configuration of number `replica` of so many engines of one model, and this process on
    its cores alone: to be called before threads are started. Each has GPUs of its own, or its part
    of the cores and of the free memory.

    Raises InvalidRequest where there are fewer GPUs than they need.
    """
    found = read_cores()
    cores = divided(found, replicas)[replica]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {thread for core in cores for thread in core.threads})
        nodes = sorted({core.node for core in cores})
        log.info("replica %d runs on %d cores of NUMA nodes %s", replica, len(cores), nodes)
    share = max(min(len(cores), found.usable // replicas), 1)
    return dataclasses.replace(
        executor,
        threads=executor.threads or share,
        memory_share=1 / replicas,
        device=_device(executor, replica, replicas),
    )


def _device(executor: ExecutorConfig, replica: int, replicas: int) -> str:
    asked, each = executor.device, executor.tensor_parallel
    if asked not in ("auto", "cuda"):
        return asked
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return asked
    if count < replicas * each:
        raise InvalidRequest(f"{replicas} replicas need {replicas * each} GPUs; there are {count}")
    return f"cuda:{replica * each}"
