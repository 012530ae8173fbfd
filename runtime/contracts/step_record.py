"""Which requests are in the step that an engine computes, for those who find it dead."""

from __future__ import annotations

from pathlib import Path

import numpy as np

STEPS = 2
"""How many steps may be under way: one that runs, and the one behind it."""


class StepRecord:
    """A file that the engine writes in memory shared with whoever reads it after its death.

    An array of int64 [STEPS, 1 + 2 rows]: how many rows each step under way has, their requests,
    and the lengths of their contexts.
    """

    def __init__(self, path: Path, max_rows: int) -> None:
        """Make the file. Steps have at most `max_rows` rows."""
        shape = (STEPS, 1 + 2 * max_rows)
        # Written, not only made so long: where the disk is full, this fails, and no step later.
        np.zeros(shape, np.int64).tofile(path)
        self._map = np.memmap(path, np.int64, "r+", shape=shape)
        # A plain view: indexing a memmap makes an object of its class each time.
        self._rows = self._map.view(np.ndarray)
        self._written: list[np.ndarray | None] = [None] * STEPS

    def begin(self, step: int, rids: np.ndarray, lengths: np.ndarray) -> None:
        """Step number `step` begins, with rows of these requests, which come to these lengths."""
        at, contexts = step % STEPS, 1 + self._rows.shape[1] // 2
        self._rows[at, contexts : contexts + len(rids)] = lengths
        if self._written[at] is not rids:
            self._rows[at, 1 : 1 + len(rids)] = rids
            self._written[at] = rids
        self._rows[at, 0] = len(rids)

    def end(self, step: int) -> None:
        self._rows[step % STEPS, 0] = 0


def read_step_record(path: Path) -> dict[int, int]:
    """The requests of the steps that were under way, and how long their contexts were to be; none
    if there is no such file."""
    try:
        steps = np.fromfile(path, np.int64).reshape(STEPS, -1)
    except (OSError, ValueError):
        return {}
    found: dict[int, int] = {}
    for step in steps:
        rids, lengths = step[1:].reshape(2, -1)[:, : max(int(step[0]), 0)].tolist()
        for rid, length in zip(rids, lengths, strict=True):
            found[rid] = max(length, found.get(rid, 0))
    return found
