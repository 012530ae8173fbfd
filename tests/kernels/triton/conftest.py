"""Tests here that keep to the CPU need Triton's interpreter, which a machine with a GPU does not
use: there kernels are compiled, and `tests/gpu` runs them."""

import pytest
import torch

if not torch.cuda.is_available():
    from tests.interpreter import replace_once_a_kernel

    replace_once_a_kernel()


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and hasattr(request.module, "CPU"):
        pytest.skip("interprets kernels; this machine has a GPU (see tests/gpu)")
