"""The masks of a step: where each constrained row's stands, and who fills the missing ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from rootlace.runtime.scheduler.plan import MaskRow
from rootlace.runtime.scheduler.request import Matcher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MaskJob:
    """One mask to fill: into `out`, or (None) the row of a shared table that `matcher` is at."""

    matcher: Matcher
    out: np.ndarray | None

    def run(self) -> None:
        """A mask of one request that cannot be filled allows nothing: that request ends alone."""
        if self.out is None:
            self.matcher.prepare_mask()
            return
        try:
            self.matcher.fill_bitmask(self.out)
        except Exception:
            log.exception("a mask could not be filled")
            self.out[:] = 0


class MaskFiller(Protocol):
    """Runs mask jobs; those of one step are independent of each other."""

    def start(self, jobs: list[MaskJob]) -> Callable[[], None] | None:
        """Begin. What it returns waits until all are done and raises if one failed; None if they
        are done already."""


class InlineFiller:
    """Fills masks at once, on the calling thread."""

    def start(self, jobs: list[MaskJob]) -> Callable[[], None] | None:
        try:
            for job in jobs:
                job.run()
        except Exception as error:
            return partial(_raise, error)
        return None


def _raise(error: Exception) -> None:
    raise error


def new_masks(rows: int, words: int) -> np.ndarray:
    """int32 [rows, words], uninitialised; an executor may want memory of another kind."""
    return np.empty((rows, words), np.int32)


class StepMasks:
    """Makes the masks of each step.

    Requests whose matcher shares a table of masks name a row of it; the others' masks are rows of
    one array per step, which `allocate(rows, words)` makes (int32).
    """

    def __init__(
        self,
        vocab_size: int,
        filler: MaskFiller | None = None,
        allocate: Callable[[int, int], np.ndarray] = new_masks,
    ) -> None:
        self._words = -(-vocab_size // 32)
        self._filler = filler or InlineFiller()
        self._allocate = allocate

    def start(
        self, matchers: Sequence[Matcher]
    ) -> tuple[list[np.ndarray | MaskRow], Callable[[], None] | None]:
        """A mask per matcher, and what to call before reading them (None: nothing to wait for).

        No matcher may be used before the masks were waited for.
        """
        shared = [matcher.mask_row() for matcher in matchers]
        alone = shared.count(None)
        own = iter(self._allocate(alone, self._words)) if alone else iter(())
        masks: list[np.ndarray | MaskRow] = []
        jobs: list[MaskJob] = []
        preparing: set[tuple[int, int]] = set()
        for matcher, row in zip(matchers, shared, strict=True):
            if row is None:
                mask: np.ndarray = next(own)
                jobs.append(MaskJob(matcher, mask))
                masks.append(mask)
                continue
            masks.append(row)
            if not row.table.filled(row.row) and (row.table.key, row.row) not in preparing:
                preparing.add((row.table.key, row.row))
                jobs.append(MaskJob(matcher, None))
        return masks, self._filler.start(jobs) if jobs else None
