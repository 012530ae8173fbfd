"""A real model for tests: SmolLM2-135M-Instruct, which `make setup` downloads where it can.

    from tests.real_model import SMOLLM2, needs_smollm2

    @needs_smollm2
    def test_something() -> None: ...

It answers as a small real model does. What it says may change with kernels and data types: tests
state what any of its sensible answers has, or compare two ways to the same one.
"""

from pathlib import Path

import pytest

from rootlace.runtime.model.hub.local import PackagedFile, packaged_model


def _find() -> Path | None:
    model = packaged_model("smollm2")
    assert model is not None
    return PackagedFile("smollm2", model).find()


SMOLLM2: Path | None = _find()
"""The GGUF file; None where it has not been downloaded."""

WITHOUT_SMOLLM2 = (
    "needs the model smollm2: `make setup` or `rootlace models get smollm2` downloads it"
)
"""Why a test is skipped where there is none."""

needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason=WITHOUT_SMOLLM2)
