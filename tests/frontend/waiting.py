"""Waiting for something that another thread does, without depending on how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], patience: float = 20.0) -> None:
    """Returns as soon as `condition` holds; fails only when it never does."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)
