"""The masks of a step: where each constrained row's stands, and who fills the missing ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakSet

import numpy as np

from rootlace.runtime.cache import Node
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SampleRow
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import SamplingParams

# Order --------------------------------------------------------------------------------------------
#
# Depth-first order of the sequences of a step.


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """Sequences so that those whose paths share a node are neighbours, at every depth.

    `common[i]` are the leading tokens that sequences i and i + 1 share in the tree.
    """

    sequences: list[RequestState]
    common: list[int]

    def only(self, members: Collection[RequestState]) -> DepthFirst:
        """Those of them that are `members`."""
        sequences: list[RequestState] = []
        common: list[int] = []
        shared = 0
        for sequence, following in zip(self.sequences, [*self.common, 0], strict=True):
            if sequence in members:
                sequences.append(sequence)
                common.append(shared)
                shared = following
            else:
                shared = min(shared, following)
        return DepthFirst(sequences, common[1:])


def depth_first(sequences: list[RequestState]) -> DepthFirst:
    """Siblings, and sequences at the same node, keep the order given. Costs O(nodes locked)."""
    ending: dict[Node, list[RequestState]] = {}
    children: dict[Node, list[Node]] = {}
    roots: list[Node] = []
    alone: list[RequestState] = []
    for sequence in sequences:
        node = sequence.node
        if node is None:
            alone.append(sequence)
            continue
        ending.setdefault(node, []).append(sequence)
        if node in children:
            continue
        children[node] = []
        while node.parent is not None:
            child, node = node, node.parent
            if node in children:
                children[node].append(child)
                break
            children[node] = [child]
        else:
            roots.append(node)
    ordered: list[RequestState] = []
    common: list[int] = []
    shared = 0  # with the sequence before: where the paths to it and to here part
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        shared = min(shared, 0 if node.parent is None else node.parent.end)
        for sequence in ending.get(node, ()):
            ordered.append(sequence)
            common.append(shared)
            shared = node.end
        stack.extend(reversed(children[node]))
    return DepthFirst(ordered + alone, [*common[1:], *([0] * len(alone))][: len(sequences) - 1])


# Decode rows --------------------------------------------------------------------------------------
#
# The rows of sequences that decode, as arrays that go from step to step.


_SPARE_COLUMNS = 32
"""Room in block tables: after this many more blocks per row they are made anew."""


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One token of each of R sequences, in the order of the rows.

    `block_tables` are shared with the steps before and after: entries behind a row's own blocks
    change.
    """

    sequences: list[RequestState]
    token_ids: np.ndarray  # [R] int32, those that are not known yet mean nothing
    positions: np.ndarray  # [R] int32
    slots: np.ndarray  # [R] int64
    row_start: np.ndarray  # [R+1] int32: 0, 1, ... R
    block_tables: np.ndarray  # [R, W] int32
    common_blocks: np.ndarray  # int32, see `StepPlan`
    rids: np.ndarray  # [R] int64


class DecodeRows:
    """Lays decode rows out.

    A sequence that decodes gains a block now and then at the end of its table, which changes in no
    other way, and is one token further in each step. So while the same sequences decode, a step's
    arrays follow from those before it, and nothing is done that grows with the context.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._ready: list[RequestState] = []
        self._order = DepthFirst([], [])
        self._version = -1
        self._last = _layout(self._order, block_size)
        self._inside = 0
        """Number of further steps in which no row begins a block."""

    def lay_out(self, ready: list[RequestState], order: DepthFirst, version: int) -> DecodeLayout:
        """The rows of `ready`, whose `computed` counts this step's token already.

        Call it for every step. `order` has these sequences, and perhaps others, in the order of the
        rows; it is a new object whenever the order changes. `version` changes whenever a table
        changed other than at its end, or `computed` other than by a step's token.
        """
        kept = order is self._order and version == self._version and ready == self._ready
        self._ready, self._order, self._version = ready, order, version
        following = self._following() if kept else None
        if following is None:
            if len(ready) < len(order.sequences):
                order = order.only(set(ready))
            following = _layout(order, self._size)
            self._inside = self._steps_inside(following.positions)
        self._last = following
        return following

    def _following(self) -> DecodeLayout | None:
        """The step behind the last one; None if the tables have no room for it."""
        last = self._last
        positions, slots = last.positions + 1, last.slots + 1
        if self._inside:
            self._inside -= 1
        else:
            tables, size = last.block_tables, self._size
            columns, inside = np.divmod(positions, size)
            rows = np.flatnonzero(inside == 0)
            if len(rows):
                columns = columns[rows]
                if columns.max() >= tables.shape[1]:
                    return None
                sequences = last.sequences
                blocks = [
                    sequences[row].table[column]
                    for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
                ]
                tables[rows, columns] = blocks
                slots[rows] = np.array(blocks, np.int64) * size
            self._inside = size - 1 - int(inside.max(initial=0))  # maybe no rows
        token_ids = np.array([sequence.last for sequence in last.sequences], np.int32)
        return DecodeLayout(
            last.sequences,
            token_ids,
            positions,
            slots,
            last.row_start,
            last.block_tables,
            last.common_blocks,
            last.rids,
        )

    def _steps_inside(self, positions: np.ndarray) -> int:
        """How many steps after the one with these positions begin no block in any row."""
        return self._size - 1 - int((positions % self._size).max(initial=0))


def _layout(order: DepthFirst, size: int) -> DecodeLayout:
    """The layout computed from the sequences alone."""
    sequences = order.sequences
    positions = np.array([sequence.computed for sequence in sequences], np.int32)
    positions -= 1
    columns = positions // size
    tables = np.zeros((len(sequences), int(columns.max(initial=-1)) + 1 + _SPARE_COLUMNS), np.int32)
    for row, sequence in enumerate(sequences):
        used = int(columns[row]) + 1
        tables[row, :used] = sequence.table[:used]
    slots = tables[np.arange(len(sequences)), columns].astype(np.int64)
    slots *= size
    slots += positions - columns * size
    return DecodeLayout(
        sequences,
        np.array([sequence.last for sequence in sequences], np.int32),
        positions,
        slots,
        np.arange(len(sequences) + 1, dtype=np.int32),
        tables,
        np.array(order.common, np.int32) // size,
        np.array([sequence.rid for sequence in sequences], np.int64),
    )


# Masks --------------------------------------------------------------------------------------------


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


# Sample rows --------------------------------------------------------------------------------------
#
# What the rows of a step sample with: tokens, bans, masks, and where automata stand.


log = logging.getLogger(__name__)

Constraint = np.ndarray | MaskRow | AutomatonState

_PLAIN = SamplingParams(temperature=0.0, seed=0)


class SampleRows:
    """Makes the sample rows of each step.

    Where the last token of a row is not known yet, the device can do without the host if all the
    row needs of that token is the next state of an automaton. A row that needs a mask of its own,
    or all tokens for its penalties, is late: `final` makes it when the token is known.

    From `start` to the step's commit a matcher's mask may be filled on another thread, and nobody
    else may use it. `Sequence.stepped` therefore notes whether the row was given its automaton's
    state: only then is the matcher asked for the next one.
    """

    def __init__(self, masks: StepMasks, automata: bool) -> None:
        """`automata`: the executor steps those that matchers offer."""
        self._masks = masks
        self._automata = automata

    def start(
        self, rows: list[tuple[int, RequestState]]
    ) -> tuple[list[SampleRow], Callable[[], None] | None]:
        """The samples of a step's `rows` (row and sequence), and what to wait for (see
        `StepPlan.wait_for_masks`)."""
        samples: list[SampleRow] = []
        for index, s in rows:
            # Most rows of most steps: the same as `_row`, without its cases.
            if s.pending or not s.plain:
                break
            mask, matcher = None, s.matcher
            if matcher is not None and (self._automata or (mask := matcher.ready) is None):
                break
            samples.append(
                SampleRow(
                    index, s.params, s.tokens[: s.length], s.prompt_len, mask, simple=s.simple
                )
            )
        else:
            return samples, None
        return self._start(rows)

    def _start(
        self, rows: list[tuple[int, RequestState]]
    ) -> tuple[list[SampleRow], Callable[[], None] | None]:
        """`start` for rows of any kind."""
        if self._automata:
            constrained = [sequence for _, sequence in rows if sequence.matcher is not None]
            constraints, wait = self._constraints(constrained)
            return [
                _row(index, sequence, sequence.pending, constraints.get(sequence))
                for index, sequence in rows
            ], wait
        matchers = [None if s.pending else s.matcher for _, s in rows]
        masks: list[np.ndarray | MaskRow | None] = [
            None if matcher is None else matcher.ready for matcher in matchers
        ]
        missing = [
            at
            for at, (matcher, mask) in enumerate(zip(matchers, masks, strict=True))
            if matcher is not None and mask is None
        ]
        wait = None
        if missing:
            asked = [matcher for at in missing if (matcher := matchers[at]) is not None]
            found, wait = self._masks.start(asked)
            for at, mask in zip(missing, found, strict=True):
                masks[at] = mask
        return [
            _row(index, s, s.pending, mask) for (index, s), mask in zip(rows, masks, strict=True)
        ], wait

    def final(self, samples: list[SampleRow], live: dict[int, RequestState]) -> list[SampleRow]:
        """`samples` without a late one, now that the step before is committed. `live`: the
        sequences of the late ones that are still wanted. Waits for their masks."""
        constrained = [s for s in live.values() if s.matcher is not None]
        # Their tokens are known: what is pending is what they are to sample.
        constraints, wait = self._constraints(constrained, known=True)
        if wait is not None:
            wait()
        done = [dead_row(sample) if sample.late else sample for sample in samples]
        for at, sequence in live.items():
            done[at] = _row(samples[at].row, sequence, 0, constraints.get(sequence))
        return done

    def begin_drafts(self) -> None:
        """A step is planned, and `along` is asked for its drafts."""
        self._masks.begin_drafts()

    def along(self, sequence: RequestState, draft: list[int]) -> list[Constraint | None]:
        """What the next token of `sequence`, none being pending, is sampled with, and each one
        behind a token of `draft`: fewer where the constraint refuses one, or the text ends.

        Where that may take long it is looked into beside the step, and the draft is cut then (see
        `DraftJob`): until the step's masks were waited for nobody may use the matcher."""
        matcher = sequence.matcher
        if matcher is None:
            return [None] * (len(draft) + 1)
        found: list[Constraint | None] = []
        begun = time.perf_counter()

        def at_hand(place: int) -> bool:
            state = _automaton(sequence, matcher) if self._automata else None
            found.append(state or self._masks.at_hand(matcher, begun))
            return found[-1] is not None

        walk(matcher, draft, at_hand, sequence.fail)
        self._masks.spend(begun)
        if sequence.fault is not None:
            return []
        if found and found[-1] is None:
            found[-1:] = self._masks.along(matcher, draft, len(found) - 1, sequence.fail)
        return found

    def start_drafts(self, wait: Callable[[], None] | None) -> Callable[[], None] | None:
        """The masks of the drafts that `along` was asked for (see `StepMasks.start_drafts`)."""
        return self._masks.start_drafts(wait)

    def drafted(
        self, row: int, sequence: RequestState, constraints: list[Constraint | None]
    ) -> list[SampleRow]:
        """The samples of a row with a draft, as `along` found it."""
        params, last = sequence.params, len(constraints) - 1
        samples = []
        for at, constraint in enumerate(constraints):
            state = constraint if isinstance(constraint, AutomatonState) else None
            samples.append(
                SampleRow(
                    row,
                    params,
                    sequence.tokens[: sequence.length + at],
                    sequence.prompt_len,
                    None if isinstance(constraint, AutomatonState) else constraint,
                    params.stop_token_ids if sequence.outputs + at < params.min_tokens else (),
                    automaton=state,
                    simple=sequence.simple,
                    back=last - at,
                )
            )
        return samples

    def _constraints(
        self, sequences: list[RequestState], *, known: bool = False
    ) -> tuple[dict[RequestState, Constraint], Callable[[], None] | None]:
        """The constraints of those of `sequences` that are not late; all have a matcher. `known`:
        no token is pending."""
        found: dict[RequestState, Constraint] = {}
        masked: dict[RequestState, Matcher] = {}
        for sequence in sequences:
            matcher = sequence.matcher
            assert matcher is not None
            ahead = sequence.pending and not known
            state = None
            if self._automata and (sequence.stepped or not ahead):
                state = _automaton(sequence, matcher)
            sequence.stepped = state is not None
            if state is not None:
                found[sequence] = state
            elif not ahead:
                masked[sequence] = matcher
        if not masked:
            return found, None
        masks, wait = self._masks.start(list(masked.values()))
        found.update(zip(masked, masks, strict=True))
        return found, wait


def dead_row(sample: SampleRow) -> SampleRow:
    """The final form of a late row whose sample nobody wants any more."""
    return replace(sample, late=False, params=_PLAIN, mask=None, automaton=None, banned=())


def _row(
    index: int, sequence: RequestState, pending: int, constraint: Constraint | None = None
) -> SampleRow:
    """`pending`: how many tokens (0 or 1) come before the one to be sampled and are not known."""
    params = sequence.params
    banned = params.stop_token_ids if sequence.outputs + pending < params.min_tokens else ()
    tokens = sequence.tokens[: sequence.length]
    state = None
    if isinstance(constraint, AutomatonState):
        state, constraint = constraint, None
    if not pending:
        return SampleRow(
            index, params, tokens, sequence.prompt_len, constraint, banned,
            automaton=state, simple=sequence.simple,
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
