"""Division of a machine's cores among engines."""

import pytest

from rootlace.kernels.native.machine import Core
from rootlace.runtime.config import ExecutorConfig
from rootlace.runtime.model.executor import refusals
from rootlace.runtime.model.executor.refusals import cores_of, take_share


def machine(*nodes: int) -> list[Core]:
    """Return cores with two hardware threads, on these nodes."""
    return [Core((at, at + len(nodes)), node) for at, node in enumerate(nodes)]


@pytest.mark.parametrize("replicas", range(1, 8))
def test_every_core_is_somebodys(replicas: int) -> None:
    cores = machine(*[0, 1] * 8)
    parts = [cores_of(cores, replica, replicas) for replica in range(replicas)]
    threads = [core.threads for part in parts for core in part]
    assert sorted(threads) == sorted(core.threads for core in cores)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("nodes", "replicas"), [(2, 2), (2, 4), (4, 2), (4, 4), (4, 8)])
def test_nobody_has_parts_of_two_nodes_where_that_can_be(nodes: int, replicas: int) -> None:
    cores = machine(*[at % nodes for at in range(16)])  # the system lists them in turns
    for replica in range(replicas):
        used = {core.node for core in cores_of(cores, replica, replicas)}
        assert len(used) == max(nodes // replicas, 1)
        for node in used if nodes >= replicas else ():
            assert sum(core.node == node for core in cores) * len(used) == 16 // replicas


def test_fewer_cores_than_engines_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores_of(machine(0), 1, 2) == []
    monkeypatch.setattr(refusals, "cores_of", lambda *_: [])
    taken = take_share(ExecutorConfig(device="cpu"), 1, 64)
    assert (taken.threads, taken.memory_share, taken.device) == (1, 1 / 64, "cpu")
    assert take_share(ExecutorConfig(device="cpu", threads=3), 1, 64).threads == 3


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "expected"),
    [
        ("auto", 1, 0, "auto"),
        ("cuda", 1, 2, "cuda:1"),
        ("cuda:0", 1, 2, "cuda:0"),
        ("cuda", 3, 6, "cuda:3"),
    ],
)
def test_each_has_gpus_of_its_own(
    asked: str, ranks: int, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine has as many GPUs as ranks."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert refusals._device(ExecutorConfig(device=asked, tensor_parallel=ranks), 1, 2) == expected
