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

MOST_CASES = 3
EVERY = 5
"""Of a test with more cases than `MOST_CASES` the first and every fifth after it run on the CPU:
that says whether the tests are right, and a GPU runs them all."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--on-cpu") != "reference":
        return
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    counts = Counter(test_of(item) for item in own)
    seen: Counter[str] = Counter()
    left_out = []
    for item in own:
        test = test_of(item)
        if counts[test] > MOST_CASES and seen[test] % EVERY:
            left_out.append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def test_of(item: pytest.Item) -> str:
    """The test that an item is a case of."""
    return item.nodeid.split("[")[0]


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
