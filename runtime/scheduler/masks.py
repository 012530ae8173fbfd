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
DRAFT_SECONDS = 10e-3
"""Time per step for the masks of drafts made beside it: what has none by then is given up. A mask
that a row needs without a draft, too, is made however long it takes."""


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
    """That a mask of the matcher's own took: CPU time of its thread, without waiting for the
    interpreter."""

    def run(self) -> None:
        """Never raises."""
        started = time.thread_time()
        made = _fill(self.matcher, self.out, self.shared)
        for matcher, out in self.others:
            if made:
                out[:] = self.out
            else:  # what failed is the first one's request alone
                _fill(matcher, out, self.shared)
        if self.shared is None:
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


@dataclass(slots=True)
class DraftJob:
    """The masks along a draft: of what comes behind its first `first` tokens, and behind each one
    more. They are written to `outs` while the matcher takes the draft in, and then it takes all of
    it back. From the draft are removed the tokens behind which there is no mask by `deadline`
    (`time.perf_counter`), or nothing can follow."""

    matcher: Matcher
    draft: list[int]
    first: int
    outs: np.ndarray
    failed: Callable[[BaseException], None]
    """Told what the matcher raised when it was to take the draft back."""
    deadline: float = 0.0
    seconds: float = 0.0
    """Of the slowest mask, as for `MaskJob`."""

    def run(self) -> None:
        """Never raises."""
        kept = walk(self.matcher, self.draft, self._fill, self.failed)
        del self.draft[max(kept, 0) :]

    def _fill(self, place: int) -> bool:
        if place and time.perf_counter() >= self.deadline:
            return False
        if place < self.first:
            return True
        row, started = self.matcher.mask_row(), time.thread_time()
        made = _fill(self.matcher, self.outs[place - self.first], row)
        if row is None:
            self.seconds = max(self.seconds, time.thread_time() - started)
        return made


def walk(
    matcher: Matcher,
    draft: list[int],
    visit: Callable[[int], bool],
    failed: Callable[[BaseException], None],
) -> int:
    """Have the matcher take in a draft, for as long as it can and `visit` returns True behind so
    many tokens of it, and take it back. Returns the last number for which it did; -1: none.

    Never raises: `failed` is told what the matcher raised when it was to take the draft back.
    """
    kept, taken = -1, 0
    try:
        for place, token in enumerate([*draft, None]):
            if not visit(place):
                break
            kept = place
            if token is None or not matcher.advance(token):
                break
            taken += 1
            if matcher.is_finished():
                break
    except BaseException:  # a panic in a compiled library is no Exception
        log.exception("a constraint failed on a draft")
    try:
        matcher.rollback(taken)
    except BaseException as error:
        failed(error)
    return kept


class Job(Protocol):
    """Something to be done beside a step."""

    def run(self) -> None:
        """Never raises."""


class MaskFiller(Protocol):
    """Runs jobs; those of one step are independent of each other."""

    def start(self, jobs: Sequence[Job]) -> Callable[[], None] | None:
        """Begin. What it returns waits until all are done; None if they are done already."""


class InlineFiller:
    """Fills masks at once, on the calling thread."""

    def start(self, jobs: Sequence[Job]) -> Callable[[], None] | None:
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
        draft_seconds: float = DRAFT_SECONDS,
    ) -> None:
        """`spot_seconds`: how much of a step goes into masks made on the spot (0: none is);
        `draft_seconds`: how long it may wait for those of its drafts, beside what it waits for
        without any."""
        self._words = -(-vocab_size // 32)
        self._spot_seconds = spot_seconds
        self._draft_seconds = draft_seconds
        self._filler = filler or InlineFiller()
        self._slow: WeakSet[Matcher] = WeakSet()
        self._handed: list[MaskJob] = []
        self._drafts: list[DraftJob] = []
        self._drafts_handed: list[DraftJob] = []
        self._spent = 0.0
        """Seconds that went into the step being planned, on the spot."""

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
        self._learn(self._handed)
        masks: list[np.ndarray | MaskRow] = []
        jobs: list[MaskJob] = []
        preparing: dict[tuple[int, int], MaskJob] = {}
        for matcher, row, there in zip(matchers, rows, filled, strict=True):
            if row is not None and there:
                masks.append(row)
                continue
            key = None if row is None else (row.table.key, row.row)
            mask = next(own)
            masks.append(mask)
            if key is not None and key in preparing:
                preparing[key].others.append((matcher, mask))
            elif key is None and self._spent < self._spot_seconds and matcher not in self._slow:
                self._spent += self._fill(matcher, mask)[1]
            else:
                jobs.append(MaskJob(matcher, mask, row))
                if key is not None:
                    preparing[key] = jobs[-1]
        self._handed, self._spent = jobs, 0.0
        return masks, self._filler.start(jobs) if jobs else None

    # ------------------------------------------------------------ drafts

    def begin_drafts(self) -> None:
        """A step is planned: what its drafts take on the spot counts before what `start` does."""
        self._spent = 0.0

    def at_hand(self, matcher: Matcher, begun: float) -> np.ndarray | MaskRow | None:
        """A mask that is there or is made on the spot; None where it may take long, or the step has
        had its time, with what was done since `begun` (`time.perf_counter`)."""
        if self._spent + time.perf_counter() - begun >= self._spot_seconds:
            return None
        row = matcher.mask_row()
        if row is not None:
            return row if row.address != 0 or row.table.filled(row.row) else None
        out = np.empty(self._words, np.int32)
        quick = matcher not in self._slow
        return out if quick and self._fill(matcher, out)[0] else None

    def spend(self, begun: float) -> None:
        """What was done since then was part of planning the step."""
        self._spent += time.perf_counter() - begun

    def along(
        self,
        matcher: Matcher,
        draft: list[int],
        first: int,
        failed: Callable[[BaseException], None],
    ) -> list[np.ndarray]:
        """The masks of a `DraftJob`, to be read when the step's are."""
        outs = np.zeros((len(draft) + 1 - first, self._words), np.int32)
        self._drafts.append(DraftJob(matcher, draft, first, outs, failed))
        return list(outs)

    def start_drafts(self, wait: Callable[[], None] | None) -> Callable[[], None] | None:
        """Begin with what `along` was asked for: none of these matchers may be used before it was
        waited for. Returns what waits for it and for what `wait` waits for."""
        drafts, self._drafts = self._drafts, []
        self._learn(self._drafts_handed)
        self._drafts_handed = drafts
        if not drafts:
            return wait
        deadline = time.perf_counter() + self._draft_seconds
        for job in drafts:
            job.deadline = deadline
        more = self._filler.start(drafts)
        if wait is None or more is None:
            return wait or more

        def both() -> None:
            wait()
            more()

        return both

    def _fill(self, matcher: Matcher, out: np.ndarray) -> tuple[bool, float]:
        """Fill a mask now: whether it could be, and the seconds it took."""
        started = time.perf_counter()
        made = _fill(matcher, out)
        seconds = time.perf_counter() - started
        if seconds > QUICK_SECONDS:
            self._slow.add(matcher)
        return made, seconds

    def _learn(self, jobs: Sequence[MaskJob | DraftJob]) -> None:
        """Note which matchers are slow, from the last jobs; those not run yet are skipped."""
        for job in jobs:
            if job.seconds > QUICK_SECONDS:
                self._slow.add(job.matcher)
            elif job.seconds:
                self._slow.discard(job.matcher)
