"""Tests here that keep to the CPU need Triton's interpreter, which a machine with a GPU does not
use: there kernels are compiled, and `tests/gpu` runs them."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and hasattr(request.module, "CPU"):
        pytest.skip("interprets kernels; this machine has a GPU (see tests/gpu)")
