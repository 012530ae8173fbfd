"""Where the tests of this folder run: on a GPU, with real shapes; they are skipped without one.

`pytest tests/gpu --on-cpu` runs them on the CPU, with the reference kernels and small shapes. That
says nothing about a GPU; it says that the tests themselves are right. `--on-cpu=triton` takes the
Triton kernels, interpreted, where kernels are tested by themselves.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from rootlace.kernels import KernelSet, kernels_for

EVERY = 3
"""On the CPU one of so many cases of a test runs: they differ in what only a GPU shows."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--on-cpu") != "reference":
        return
    counts: Counter[str] = Counter()
    left_out = []
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            test = item.nodeid.split("[")[0]
            if counts[test] % EVERY:
                left_out.append(item)
            counts[test] += 1
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.config.getoption("--on-cpu"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU with CUDA (--on-cpu runs this on the CPU)")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def real(device: torch.device) -> bool:
    """Whether shapes are those of real models."""
    return device.type == "cuda"


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, device: torch.device, real: bool) -> KernelSet:
    """The device's own; on a GPU they must not be the reference."""
    if request.config.getoption("--on-cpu") == "triton":
        from rootlace.kernels.triton import TRITON

        return TRITON
    found = kernels_for(device)
    assert found.name == ("triton" if real else "reference")
    return found
