"""What one of several engines of a machine takes of it."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

from rootlace.kernels.native.cores import Core, read_cores
from rootlace.runtime.config import ExecutorConfig
from rootlace.wire.errors import InvalidRequest

log = logging.getLogger(__name__)


def take_share(executor: ExecutorConfig, replica: int, replicas: int) -> ExecutorConfig:
    """The configuration of number `replica` of so many engines of one model, and this process on
    its cores alone: to be called before threads are started. Each has a GPU of its own, or its part
    of the cores and of the free memory.

    Raises InvalidRequest where there are fewer GPUs than engines.
    """
    found = read_cores()
    cores = cores_of(found.all, replica, replicas)
    if cores and hasattr(os, "sched_setaffinity"):
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


def cores_of(cores: Sequence[Core], replica: int, replicas: int) -> list[Core]:
    """As many for each, neighbours of one node where that can be; none where there are too few.

    Where the number of engines is a multiple of the number of nodes, or the reverse, and nodes are
    equally large, none has parts of two nodes.
    """
    if len(cores) < replicas:
        return []
    sorted_by_node = sorted(cores, key=lambda core: core.node)
    first, end = (len(cores) * number // replicas for number in (replica, replica + 1))
    return sorted_by_node[first:end]


def _device(executor: ExecutorConfig, replica: int, replicas: int) -> str:
    asked, each = executor.device, executor.tensor_parallel
    if asked not in ("auto", "cuda"):
        return asked
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return asked
    if count < replicas * each:
        ranks = f" of {each} ranks" if each > 1 else ""
        raise InvalidRequest(f"{replicas} replicas{ranks} need as many GPUs; there are {count}")
    return f"cuda:{replica * each}"
