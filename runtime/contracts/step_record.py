"""Which requests are in the step that an engine computes, for those who find it dead."""

from __future__ import annotations

from pathlib import Path

import numpy as np

STEPS = 2
"""How many steps may be under way: one that runs, and the one behind it."""


class StepRecord:
    """A file that the engine writes in memory shared with whoever reads it after its death.

    An array of int64 [STEPS, 1 + rows]: how many rows each step under way has, and their requests.
    """

    def __init__(self, path: Path, max_rows: int) -> None:
        """Make the file. Steps have at most `max_rows` rows."""
        shape = (STEPS, 1 + max_rows)
        self._map = np.memmap(path, np.int64, "w+", shape=shape)
        # A plain view: indexing a memmap makes an object of its class each time.
        self._rows = self._map.view(np.ndarray)
        self._written: list[np.ndarray | None] = [None] * STEPS

    def begin(self, step: int, rids: np.ndarray) -> None:
        """Step number `step` begins, with rows of these requests."""
        at = step % STEPS
        if self._written[at] is not rids:
            self._rows[at, 1 : 1 + len(rids)] = rids
            self._written[at] = rids
        self._rows[at, 0] = len(rids)

    def end(self, step: int) -> None:
        self._rows[step % STEPS, 0] = 0


def read_step_record(path: Path) -> set[int]:
    """The requests of the steps that were under way; none if there is no such file."""
    try:
        rows = np.fromfile(path, np.int64).reshape(STEPS, -1)
    except (OSError, ValueError):
        return set()
    return {int(rid) for row in rows for rid in row[1 : 1 + max(int(row[0]), 0)]}
