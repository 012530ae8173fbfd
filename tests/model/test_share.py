"""What one of several engines of a machine takes of it."""

from __future__ import annotations

import pytest

from rootlace.kernels.native.cores import Core, Cores
from rootlace.runtime.config import ExecutorConfig
from rootlace.runtime.model.executor import share
from rootlace.runtime.model.executor.share import take_share
from rootlace.wire.errors import InvalidRequest

# Two nodes, listed in turns; each core has two hardware threads.
CORES = tuple(Core((at, at + 8), at % 2) for at in range(8))


@pytest.mark.parametrize(
    ("cores", "quota", "replicas", "expected", "threads"),
    [
        (CORES, None, 2, [{0, 2, 4, 6, 8, 10, 12, 14}, {1, 3, 5, 7, 9, 11, 13, 15}], 4),
        (CORES, 4.0, 2, [{0, 2, 4, 6, 8, 10, 12, 14}, {1, 3, 5, 7, 9, 11, 13, 15}], 2),
        (CORES, 1.0, 2, [{0, 2, 4, 6, 8, 10, 12, 14}, {1, 3, 5, 7, 9, 11, 13, 15}], 1),
        (CORES[:1], None, 2, [{0, 8}, {0, 8}], 1),
    ],
)
def test_each_has_its_cores_and_memory(
    cores: tuple[Core, ...],
    quota: float | None,
    replicas: int,
    expected: list[set[int]],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(share, "read_cores", lambda: Cores(cores, quota))
    monkeypatch.setattr(share.os, "sched_setaffinity", lambda _, found: bound.append(set(found)))
    for replica in range(replicas):
        taken = take_share(ExecutorConfig(device="cpu"), replica, replicas)
        assert (taken.threads, taken.memory_share, taken.device) == (threads, 1 / replicas, "cpu")
        asked = take_share(ExecutorConfig(device="cpu", threads=3), replica, replicas)
        assert asked.threads == 3
    assert bound[::2] == expected


def test_each_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = 0
    monkeypatch.setattr(share.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert take_share(ExecutorConfig(), 1, 2).device == "auto"
    gpus = 4
    assert take_share(ExecutorConfig(), 1, 2).device == "cuda:1"
    assert take_share(ExecutorConfig(device="cuda:0"), 1, 2).device == "cuda:0"
    assert take_share(ExecutorConfig(tensor_parallel=2), 1, 2).device == "cuda:2"
    with pytest.raises(InvalidRequest, match="6 GPUs; there are 4"):
        take_share(ExecutorConfig(tensor_parallel=2), 1, 3)
