"""Sample rows of a step, and their masks: filled at once, or beside the step by a filler.

Sections: mask jobs, masks, sample rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from weakref import WeakSet

import numpy as np
from msgspec.structs import replace

from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SampleRow
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import SamplingParams

log = logging.getLogger(__name__)

QUICK_SECONDS = 50e-6
"""Seconds up to which a mask is filled on the spot.

Handing a mask to another thread costs about as much, as both share the interpreter. Most masks
take a tenth of this.
"""
SPOT_SECONDS = 200e-6
"""Seconds per step for masks filled on the spot; further masks are filled beside the step."""
DRAFT_SECONDS = 10e-3
"""Seconds per step for draft masks filled beside the step; drafted tokens without a mask are
dropped.

The mask that a row needs without a draft is filled however long that takes.
"""


@dataclass(slots=True)
class MaskJob:
    """Job of one mask to write to `out`, and to the table row `shared`, if any. `others`: further
    matchers of the step at that row, and the targets of their masks."""

    matcher: Matcher
    out: np.ndarray
    shared: MaskRow | None = None
    others: list[tuple[Matcher, np.ndarray]] = field(default_factory=list)
    seconds: float = 0.0
    """CPU seconds of the matcher's mask, without waiting for the interpreter."""

    def run(self) -> None:
        """Fill the masks; never raises."""
        started = time.thread_time()
        made = _fill(self.matcher, self.out, self.shared)
        for matcher, out in self.others:
            if made:
                out[:] = self.out
            else:  # the failure concerns the first matcher's request alone
                _fill(matcher, out, self.shared)
        if self.shared is None:
            self.seconds = time.thread_time() - started


def _fill(matcher: Matcher, out: np.ndarray, shared: MaskRow | None = None) -> bool:
    """Fill a mask; return whether the matcher succeeded. Never raises: a failed mask allows
    nothing, and the request ends alone."""
    try:
        if shared is not None:
            matcher.prepare_mask()
            if shared.table.filled(shared.row):
                out[:] = shared.table.rows[shared.row]
                return True
            if matcher.error():  # a second call might lose the reason of the failure
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
    """Job of the masks along a draft: behind its first `first` tokens, and behind each further
    token.

    The masks go to `outs` while the matcher takes the draft in; then the matcher rolls back. Draft
    tokens without a mask by `deadline` (`time.perf_counter`), or without a successor, are removed.
    """

    matcher: Matcher
    draft: list[int]
    first: int
    outs: np.ndarray
    failed: Callable[[BaseException], None]
    """Receives the exception of the matcher's rollback."""
    deadline: float = 0.0
    seconds: float = 0.0
    """Seconds of the slowest mask, as for `MaskJob`."""

    def run(self) -> None:
        """Fill the masks; never raises."""
        accepted = walk(self.matcher, self.draft, self._fill, self.failed)
        del self.draft[max(accepted, 0) :]

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
    """Advance the matcher along `draft`, calling `visit` behind each token count, then roll back.

    Stops where the matcher refuses or `visit` returns False. Returns the last accepted count; -1:
    none. Never raises: `failed` receives the exception of the rollback.
    """
    accepted, taken = -1, 0
    try:
        for place, token in enumerate([*draft, None]):
            if not visit(place):
                break
            accepted = place
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
    return accepted


Job = MaskJob | DraftJob


class MaskThreads:
    """Threads that fill masks; slow matchers release the GIL. The thread that waits for masks fills
    some itself, so a worker that is scheduled late delays nothing."""

    def __init__(self, threads: int) -> None:
        """Start the threads. Raises ValueError for fewer than one."""
        if threads < 1:
            raise ValueError(f"mask_threads must be at least 1, not {threads}")
        self._work: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"masks-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, jobs: Sequence[Job]) -> Callable[[], None]:
        """Start jobs, which are independent of each other; return a function that waits for all."""
        batch = _Batch(jobs)
        for _ in range(min(len(jobs), len(self._threads))):
            self._work.put(batch)
        return batch.wait

    def close(self) -> None:
        """End the threads after all started jobs."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (batch := self._work.get()) is not None:
            batch.work()


class _Batch:
    """Jobs of one step."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._open = len(jobs)
        self._todo = deque(jobs)
        self._done: SimpleQueue[Job] = SimpleQueue()

    def work(self) -> None:
        """Run jobs until every job was begun."""
        while True:
            try:
                job = self._todo.popleft()
            except IndexError:
                return
            job.run()
            self._done.put(job)

    def wait(self) -> None:
        """Wait until all jobs are done."""
        self.work()
        while self._open:
            self._done.get()
            self._open -= 1


class StepMasks:
    """Maker of each step's masks.

    Requests whose matchers share a mask table name a filled row of the table. The other masks are
    rows of one array per step.

    The filler gets masks that may be slow: table rows, and masks of matchers whose last mask was
    slow. A mask that is slow on the spot delays the executor's start by its time.
    """

    def __init__(
        self,
        vocab_size: int,
        filler: MaskThreads | None = None,
        spot_seconds: float = SPOT_SECONDS,
        draft_seconds: float = DRAFT_SECONDS,
    ) -> None:
        """Make the masks. Without a `filler` all masks are made on the calling thread.

        `spot_seconds`: limit per step for masks made on the spot (0: none is). `draft_seconds`:
        extra waiting time of a step for the masks of its drafts.
        """
        self._words = -(-vocab_size // 32)
        self._spot_seconds = spot_seconds
        self._draft_seconds = draft_seconds
        self._filler = filler
        self._slow: WeakSet[Matcher] = WeakSet()
        self._handed: list[MaskJob] = []
        self.drafts: list[DraftJob] = []
        self.drafts_handed: list[DraftJob] = []
        self._spent = 0.0
        """Seconds spent on the spot in the step being planned."""

    def start(
        self, matchers: Sequence[Matcher]
    ) -> tuple[list[np.ndarray | MaskRow], Callable[[], None] | None]:
        """Return a mask per matcher, and a function to call before reading the masks (None: no
        wait). No matcher may be used before the masks were waited for."""
        rows: list[MaskRow | None] = []
        filled: list[bool] = []
        for matcher in matchers:
            row = matcher.mask_row()
            rows.append(row)
            there = row is not None and (row.address != 0 or row.table.filled(row.row))
            filled.append(there)
        if False not in filled:
            return rows, None  # type: ignore[return-value]
        buffers = iter(np.empty((filled.count(False), self._words), np.int32))
        self._learn(self._handed)
        masks: list[np.ndarray | MaskRow] = []
        jobs: list[MaskJob] = []
        preparing: dict[tuple[int, int], MaskJob] = {}
        for matcher, row, there in zip(matchers, rows, filled, strict=True):
            if row is not None and there:
                masks.append(row)
                continue
            key = None if row is None else (row.table.key, row.row)
            mask = next(buffers)
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
        return masks, self._run(jobs)

    # ------------------------------------------------------------ drafts

    def begin_drafts(self) -> None:
        """Start a step's plan: draft masks on the spot count before those of `start`."""
        self._spent = 0.0

    def at_hand(self, matcher: Matcher, begun: float) -> np.ndarray | MaskRow | None:
        """Return a mask that exists or is made on the spot; None if it may be slow. None, too, once
        the step has spent its time, with the time since `begun` (`time.perf_counter`)."""
        if self._spent + time.perf_counter() - begun >= self._spot_seconds:
            return None
        row = matcher.mask_row()
        if row is not None:
            return row if row.address != 0 or row.table.filled(row.row) else None
        out = np.empty(self._words, np.int32)
        quick = matcher not in self._slow
        return out if quick and self._fill(matcher, out)[0] else None

    def spend(self, begun: float) -> None:
        """Count the time since `begun` as spent on the step's plan."""
        self._spent += time.perf_counter() - begun

    def along(
        self,
        matcher: Matcher,
        draft: list[int],
        first: int,
        failed: Callable[[BaseException], None],
    ) -> list[np.ndarray]:
        """Return the masks of a `DraftJob`, readable when the step's masks are."""
        outs = np.zeros((len(draft) + 1 - first, self._words), np.int32)
        self.drafts.append(DraftJob(matcher, draft, first, outs, failed))
        return list(outs)

    def start_drafts(self, wait: Callable[[], None] | None) -> Callable[[], None] | None:
        """Start the jobs of `along`; return a function that waits for them and for `wait`.

        No matcher of a job may be used before the wait.
        """
        drafts, self.drafts = self.drafts, []
        self._learn(self.drafts_handed)
        self.drafts_handed = drafts
        if not drafts:
            return wait
        deadline = time.perf_counter() + self._draft_seconds
        for job in drafts:
            job.deadline = deadline
        more = self._run(drafts)
        if wait is None or more is None:
            return wait or more

        def both() -> None:
            wait()
            more()

        return both

    def _run(self, jobs: Sequence[Job]) -> Callable[[], None] | None:
        """Run jobs; return a function that waits for them, None if they are done already."""
        if self._filler is not None and jobs:
            return self._filler.start(jobs)
        for job in jobs:
            job.run()
        return None

    def _fill(self, matcher: Matcher, out: np.ndarray) -> tuple[bool, float]:
        """Fill a mask now; return success and seconds."""
        started = time.perf_counter()
        made = _fill(matcher, out)
        seconds = time.perf_counter() - started
        if seconds > QUICK_SECONDS:
            self._slow.add(matcher)
        return made, seconds

    def _learn(self, jobs: Sequence[MaskJob | DraftJob]) -> None:
        """Note which matchers are slow, from the last jobs; jobs not run yet are skipped."""
        for job in jobs:
            if job.seconds > QUICK_SECONDS:
                self._slow.add(job.matcher)
            elif job.seconds:
                self._slow.discard(job.matcher)


# Sample rows --------------------------------------------------------------------------------------


Constraint = np.ndarray | MaskRow | AutomatonState

_PLAIN = SamplingParams(temperature=0.0, seed=0)


class SampleRows:
    """Maker of each step's sample rows.

    A row whose last token is pending can be planned if the next state of an automaton is all that
    the row needs of the token. A row with a mask of its own, or with penalties over all tokens, is
    late: `final` makes the row when the token is known.

    From `start` to the step's commit another thread may fill a matcher's mask, and nothing else may
    use the matcher. `RequestState.stepped` notes whether the row got its automaton's state. Only
    then is the matcher asked for the next state.
    """

    def __init__(self, masks: StepMasks, automata: bool) -> None:
        """Make the rows. `automata`: the executor advances the automata that matchers offer."""
        self.masks = masks
        self.automata = automata

    def start(
        self, rows: list[tuple[int, RequestState]]
    ) -> tuple[list[SampleRow], Callable[[], None] | None]:
        """Return the samples of `rows` (row and sequence), and `StepPlan.wait_for_masks`."""
        constraints, wait = self._constraints([s for _, s in rows if s.matcher is not None])
        return [
            _row(index, sequence, sequence.pending, constraints.get(sequence))
            for index, sequence in rows
        ], wait

    def final(self, samples: list[SampleRow], live: dict[int, RequestState]) -> list[SampleRow]:
        """Return `samples` without late ones, after the commit of the step before; waits for masks.
        `live`: sequences of late samples that are still needed."""
        constrained = [s for s in live.values() if s.matcher is not None]
        # The tokens are known: pending tokens are those to sample.
        constraints, wait = self._constraints(constrained, known=True)
        if wait is not None:
            wait()
        done = [dead_row(sample) if sample.late else sample for sample in samples]
        for at, sequence in live.items():
            done[at] = _row(samples[at].row, sequence, 0, constraints.get(sequence))
        return done

    def along(self, sequence: RequestState, draft: list[int]) -> list[Constraint | None]:
        """Return constraints of the next token of `sequence` and of each token behind a drafted
        one.

        No token may be pending. Fewer constraints return if the matcher refuses a token or the text
        ends. Slow masks are filled beside the step, and the draft is cut then (see `DraftJob`).
        Until the wait for the step's masks, nothing may use the matcher.
        """
        matcher = sequence.matcher
        if matcher is None:
            return [None] * (len(draft) + 1)
        constraints: list[Constraint | None] = []
        begun = time.perf_counter()

        def at_hand(place: int) -> bool:
            state = _automaton(sequence, matcher) if self.automata else None
            constraints.append(state or self.masks.at_hand(matcher, begun))
            return constraints[-1] is not None

        walk(matcher, draft, at_hand, sequence.fail)
        self.masks.spend(begun)
        if sequence.fault is not None:
            return []
        if constraints and constraints[-1] is None:
            constraints[-1:] = self.masks.along(matcher, draft, len(constraints) - 1, sequence.fail)
        return constraints

    def drafted(
        self, row: int, sequence: RequestState, constraints: list[Constraint | None]
    ) -> list[SampleRow]:
        """Return the samples of a row with a draft, with the constraints of `along`."""
        last = len(constraints) - 1
        return [
            _row(row, sequence, 0, constraint, drafted=at, back=last - at)
            for at, constraint in enumerate(constraints)
        ]

    def _constraints(
        self, sequences: list[RequestState], *, known: bool = False
    ) -> tuple[dict[RequestState, Constraint], Callable[[], None] | None]:
        """Return the constraints of `sequences` that are not late; all sequences have a matcher.
        `known`: no token is pending."""
        constraints: dict[RequestState, Constraint] = {}
        masked: dict[RequestState, Matcher] = {}
        for sequence in sequences:
            matcher = sequence.matcher
            assert matcher is not None
            ahead = sequence.pending and not known
            state = None
            if self.automata and (sequence.stepped or not ahead):
                state = _automaton(sequence, matcher)
            sequence.stepped = state is not None
            if state is not None:
                constraints[sequence] = state
            elif ahead:
                continue
            elif (ready := matcher.place.mask) is not None:
                constraints[sequence] = ready
            else:
                masked[sequence] = matcher
        if not masked:
            return constraints, None
        masks, wait = self.masks.start(list(masked.values()))
        constraints.update(zip(masked, masks, strict=True))
        return constraints, wait


def dead_row(sample: SampleRow) -> SampleRow:
    """Return the final form of a late row whose sample is no longer needed."""
    return replace(sample, late=False, params=_PLAIN, mask=None, automaton=None, banned=())


def _row(
    index: int,
    sequence: RequestState,
    pending: int,
    constraint: Constraint | None = None,
    drafted: int = 0,
    back: int = 0,
) -> SampleRow:
    """Return the sample row of `sequence`. `pending`: unknown tokens (0 or 1) before the sampled
    token. `drafted`: tokens of a draft before it. `back`: see `SampleRow`."""
    params, before = sequence.params, sequence.outputs + pending + drafted
    banned = params.stop_token_ids if before < params.min_tokens else ()
    tokens = sequence.tokens[: sequence.length + drafted]
    state = None
    if isinstance(constraint, AutomatonState):
        state, constraint = constraint, None
    if not pending:
        return SampleRow(
            index, params, tokens, sequence.prompt_len, constraint, banned,
            automaton=state, simple=sequence.simple, back=back,
        )  # fmt: skip
    waits = sequence.penalised or (state is None and sequence.matcher is not None)
    return SampleRow(
        index,
        params,
        tokens,
        sequence.prompt_len,
        banned=banned,
        source=sequence.sampled_at,
        automaton=state,
        late=waits,
        simple=sequence.simple,
    )


def _automaton(sequence: RequestState, matcher: Matcher) -> AutomatonState | None:
    try:
        return matcher.automaton()
    except BaseException:  # a panic in a compiled library is no Exception
        log.exception("%r: its constraint does not say where its automaton stands", sequence)
        return None
