"""Collections of garbage that hold the interpreter for milliseconds each, however much is kept."""

from __future__ import annotations

import gc
import sys

THRESHOLDS = (700, 4, 1)
"""Of Python's collector: objects by which a thread's allocations exceed what was let go of before
the youngest are collected, such collections before one of the second generation, and those before
all is collected: some 10,000 objects, which take 0.3 µs each, and 1 where others are busy."""
LOOKS = 16
"""How much is kept is asked after so many full collections."""
GROWTH = 3.0
"""All that has stayed is looked through where it has become so many times as much."""


class _Kept:
    """What outlives a full collection is not looked at by the next: cached prefixes and compiled
    constraints are hundreds of thousands of objects, which are let go of one by one, by counting.
    What of them refers in circles stays, until memory has grown by `GROWTH`: then one collection
    looks at all, which takes tenths of a second, and the next one comes when there is a quarter
    more."""

    def __init__(self) -> None:
        self._collections = 0
        self._blocks: int | None = None
        """Of memory that objects took, once all had been looked through."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase != "stop" or info["generation"] != 2:
            return
        gc.freeze()
        self._collections += 1
        if self._collections % LOOKS:
            return
        blocks = sys.getallocatedblocks()  # 0.2 ms; to count what is frozen takes 20 to 60
        if self._blocks is None:
            self._blocks = blocks
        elif blocks > GROWTH * self._blocks:
            self._blocks = None
            gc.unfreeze()  # the next collection looks at all


def collect_in_parts() -> None:
    """From now on. What is here stays."""
    gc.collect()
    gc.freeze()
    gc.collect()  # a quarter of what the last one left has to come before there is another
    gc.callbacks.append(_Kept())
    gc.set_threshold(*THRESHOLDS)
