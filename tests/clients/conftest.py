"""Unmodified clients of other projects use one server with the embedded model."""

from __future__ import annotations

import pytest

import rootlace as rl


@pytest.fixture
def url(runtime: rl.Runtime) -> str:
    assert runtime.url is not None
    return runtime.url
