"""The masks of a step: where each constrained row's stands, and who fills the missing ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

import numpy as np

from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import MaskRow

log = logging.getLogger(__name__)

QUICK_SECONDS = 50e-6
"""A mask that takes less is made on the spot: handing it to another thread and waiting costs about
as much, since both share the interpreter. Most masks take a tenth of this."""
SPOT_SECONDS = 200e-6
"""Time per step for masks made on the spot; further ones are made beside the step."""


@dataclass(slots=True)
class MaskJob:
    """One mask to write to `out`; `shared` is the row of a table that gets it too, if any.

    `others` are the further matchers of the step at that row, and where their masks go.
    """

    matcher: Matcher
    out: np.ndarray
    shared: MaskRow | None = None
    others: list[tuple[Matcher, np.ndarray]] = field(default_factory=list)
    seconds: float = 0.0
    """CPU time of its thread; waiting for the interpreter does not count."""

    def run(self) -> None:
        """Never raises."""
        started = time.thread_time()
        made = _fill(self.matcher, self.out, self.shared)
        for matcher, out in self.others:
            if made:
                out[:] = self.out
            else:  # what failed is the first one's request alone
                _fill(matcher, out, self.shared)
        self.seconds = time.thread_time() - started


def _fill(matcher: Matcher, out: np.ndarray, shared: MaskRow | None = None) -> bool:
    """Whether the mask could be filled. Never raises: one that could not allows nothing, and its
    request ends alone."""
    try:
        if shared is not None:
            matcher.prepare_mask()
            if shared.table.filled(shared.row):
                out[:] = shared.table.rows[shared.row]
                return True
            if matcher.error():  # asked again, it might forget why it failed
                out[:] = 0
                return False
        matcher.fill_bitmask(out)
        return not matcher.error()
    except BaseException:  # a panic in a compiled library is no Exception
        log.exception("a mask could not be filled")
        out[:] = 0
        return False


class MaskFiller(Protocol):
    """Runs mask jobs; those of one step are independent of each other."""

    def start(self, jobs: list[MaskJob]) -> Callable[[], None] | None:
        """Begin. What it returns waits until all are done; None if they are done already."""


class InlineFiller:
    """Fills masks at once, on the calling thread."""

    def start(self, jobs: list[MaskJob]) -> Callable[[], None] | None:
        for job in jobs:
            job.run()
        return None


class StepMasks:
    """Makes the masks of each step.

    Requests whose matcher shares a table of masks name a row of it, once that is filled; the other
    masks are rows of one array per step.

    The filler gets what may take long: rows of tables, and masks of matchers whose last one was not
    quick. If a mask made on the spot takes long for once, the executor merely starts that much
    later.
    """

    def __init__(
        self,
        vocab_size: int,
        filler: MaskFiller | None = None,
        spot_seconds: float = SPOT_SECONDS,
    ) -> None:
        """`spot_seconds`: how much of a step goes into masks made on the spot (0: none is)."""
        self._words = -(-vocab_size // 32)
        self._spot_seconds = spot_seconds
        self._filler = filler or InlineFiller()
        self._slow: WeakSet[Matcher] = WeakSet()
        self._handed: list[MaskJob] = []

    def start(
        self, matchers: Sequence[Matcher]
    ) -> tuple[list[np.ndarray | MaskRow], Callable[[], None] | None]:
        """A mask per matcher, and what to call before reading them (None: nothing to wait for).

        No matcher may be used before the masks were waited for.
        """
        rows = [matcher.mask_row() for matcher in matchers]
        filled = [
            row is not None and (row.address != 0 or row.table.filled(row.row)) for row in rows
        ]
        if False not in filled:
            return rows, None  # type: ignore[return-value]
        own = iter(np.empty((filled.count(False), self._words), np.int32))
        self._learn()
        masks: list[np.ndarray | MaskRow] = []
        preparing: dict[tuple[int, int], MaskJob] = {}
        spent = 0.0
        for matcher, row, there in zip(matchers, rows, filled, strict=True):
            if row is not None and there:
                masks.append(row)
                continue
            key = None if row is None else (row.table.key, row.row)
            mask = next(own)
            masks.append(mask)
            if key is not None and key in preparing:
                preparing[key].others.append((matcher, mask))
            elif key is None and spent < self._spot_seconds and matcher not in self._slow:
                spent += self._fill(matcher, mask)
            else:
                job = MaskJob(matcher, mask, row)
                self._handed.append(job)
                if key is not None:
                    preparing[key] = job
        return masks, self._filler.start(self._handed) if self._handed else None

    def now(self, matcher: Matcher, begun: float) -> np.ndarray | MaskRow | None:
        """A mask at once; None where it is not there and masks made on the spot have had their time
        since `begun` (`time.perf_counter`)."""
        row = matcher.mask_row()
        if row is not None and (row.address != 0 or row.table.filled(row.row)):
            return row
        if time.perf_counter() - begun >= self._spot_seconds:
            return None
        out = np.empty(self._words, np.int32)
        return out if _fill(matcher, out, row) else None

    def _fill(self, matcher: Matcher, out: np.ndarray) -> float:
        """Fill a mask now; returns the seconds it took."""
        started = time.perf_counter()
        _fill(matcher, out)
        seconds = time.perf_counter() - started
        if seconds > QUICK_SECONDS:
            self._slow.add(matcher)
        return seconds

    def _learn(self) -> None:
        """Note which matchers are slow, from the last jobs; those not run yet are skipped."""
        for job in self._handed:
            if job.shared is not None or not job.seconds:
                continue
            if job.seconds > QUICK_SECONDS:
                self._slow.add(job.matcher)
            else:
                self._slow.discard(job.matcher)
        self._handed = []
