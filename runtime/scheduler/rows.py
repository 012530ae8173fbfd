"""Rows of a step: depth-first order, decode rows as arrays, and sample rows.

 DecodeRows.lay_out   sequences -> token_ids, positions, slots, block_tables   [R]
 SampleRows.start     rows      -> SampleRow: params, bans, mask or automaton state

Sections: order, decode rows, sample rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from rootlace.runtime.cache import Node
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SampleRow
from rootlace.runtime.scheduler.masks import StepMasks, walk
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import SamplingParams

# Order --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """Sequences ordered so that paths sharing a node are neighbours, at every depth.

    `common[i]`: leading tokens that sequences i and i + 1 share in the tree.
    """

    sequences: list[RequestState]
    common: list[int]

    def only(self, members: Collection[RequestState]) -> DepthFirst:
        """The sequences that are in `members`, in the same order."""
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
    """Order `sequences` depth first; siblings, and sequences at one node, keep the given order.

    Costs O(nodes locked).
    """
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
    shared = 0  # tokens shared with the sequence before: where the two paths part
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


_SPARE_COLUMNS = 32
"""Spare columns of block tables: after this many more blocks per row the tables grow."""


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One token of each of R sequences, in the order of the rows.

    The steps before and after share `block_tables`: entries behind a row's own blocks change.
    """

    sequences: list[RequestState]
    token_ids: np.ndarray  # [R] int32, arbitrary where the token is pending
    positions: np.ndarray  # [R] int32
    slots: np.ndarray  # [R] int64
    row_start: np.ndarray  # [R+1] int32: 0, 1, ... R
    block_tables: np.ndarray  # [R, W] int32
    common_blocks: np.ndarray  # int32, see `StepPlan`
    rids: np.ndarray  # [R] int64


class DecodeRows:
    """Lays decode rows out, reusing the arrays of the step before.

    A decoding sequence gains a token per step, and at times a block at the end of its table. So
    while the same sequences decode, a step's arrays follow from the step before, in time
    independent of the context.
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
        rows. `order` is a new object whenever the order changes. `version` changes whenever a table
        changed other than at its end, or `computed` other than by a step's token.
        """
        reusable = order is self._order and version == self._version and ready == self._ready
        self._ready, self._order, self._version = ready, order, version
        following = self._following() if reusable else None
        if following is None:
            if len(ready) < len(order.sequences):
                order = order.only(set(ready))
            following = _layout(order, self._size)
            self._inside = self._steps_inside(following.positions)
        self._last = following
        return following

    def _following(self) -> DecodeLayout | None:
        """The layout of the following step; None if the tables have no room."""
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
            self._inside = size - 1 - int(inside.max(initial=0))  # perhaps no rows
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
        """Steps after `positions` in which no row begins a block."""
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


# Sample rows --------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

Constraint = np.ndarray | MaskRow | AutomatonState

_PLAIN = SamplingParams(temperature=0.0, seed=0)


class SampleRows:
    """Makes the sample rows of each step.

    A row whose last token is pending can still be planned. The next state of an automaton must be
    all that the row needs of the token. A row with a mask of its own, or with penalties over all
    tokens, is late: `final` makes the row when the token is known.

    From `start` to the step's commit another thread may fill a matcher's mask, and nothing else may
    use the matcher. `RequestState.stepped` notes whether the row got its automaton's state: only
    then is the matcher asked for the next state.
    """

    def __init__(self, masks: StepMasks, automata: bool) -> None:
        """`automata`: the executor advances the automata that matchers offer."""
        self._masks = masks
        self._automata = automata

    def start(
        self, rows: list[tuple[int, RequestState]]
    ) -> tuple[list[SampleRow], Callable[[], None] | None]:
        """The samples of a step's `rows` (row and sequence), and `StepPlan.wait_for_masks`."""
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
        """`samples` without late ones, after the commit of the step before; waits for masks.

        `live`: sequences of late samples that are still needed.
        """
        constrained = [s for s in live.values() if s.matcher is not None]
        # The tokens are known: pending tokens are those to sample.
        constraints, wait = self._constraints(constrained, known=True)
        if wait is not None:
            wait()
        done = [dead_row(sample) if sample.late else sample for sample in samples]
        for at, sequence in live.items():
            done[at] = _row(samples[at].row, sequence, 0, constraints.get(sequence))
        return done

    def begin_drafts(self) -> None:
        """Start a step's plan, before `along` is called for its drafts."""
        self._masks.begin_drafts()

    def along(self, sequence: RequestState, draft: list[int]) -> list[Constraint | None]:
        """Constraints of the next token of `sequence` and of each token behind a drafted one.

        No token may be pending. Fewer constraints return where the matcher refuses a token or the
        text ends.

        Slow masks are filled beside the step, and the draft is cut then (see `DraftJob`). Until the
        step's masks were waited for nothing may use the matcher.
        """
        matcher = sequence.matcher
        if matcher is None:
            return [None] * (len(draft) + 1)
        constraints: list[Constraint | None] = []
        begun = time.perf_counter()

        def at_hand(place: int) -> bool:
            state = _automaton(sequence, matcher) if self._automata else None
            constraints.append(state or self._masks.at_hand(matcher, begun))
            return constraints[-1] is not None

        walk(matcher, draft, at_hand, sequence.fail)
        self._masks.spend(begun)
        if sequence.fault is not None:
            return []
        if constraints and constraints[-1] is None:
            constraints[-1:] = self._masks.along(
                matcher, draft, len(constraints) - 1, sequence.fail
            )
        return constraints

    def start_drafts(self, wait: Callable[[], None] | None) -> Callable[[], None] | None:
        """Start the draft masks of `along` (see `StepMasks.start_drafts`)."""
        return self._masks.start_drafts(wait)

    def drafted(
        self, row: int, sequence: RequestState, constraints: list[Constraint | None]
    ) -> list[SampleRow]:
        """The samples of a row with a draft, with the constraints of `along`."""
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
        """The constraints of `sequences` that are not late; all have a matcher.

        `known`: no token is pending.
        """
        constraints: dict[RequestState, Constraint] = {}
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
                constraints[sequence] = state
            elif not ahead:
                masked[sequence] = matcher
        if not masked:
            return constraints, None
        masks, wait = self._masks.start(list(masked.values()))
        constraints.update(zip(masked, masks, strict=True))
        return constraints, wait


def dead_row(sample: SampleRow) -> SampleRow:
    """The final form of a late row whose sample is no longer needed."""
    return replace(sample, late=False, params=_PLAIN, mask=None, automaton=None, banned=())


def _row(
    index: int, sequence: RequestState, pending: int, constraint: Constraint | None = None
) -> SampleRow:
    """The sample row of `sequence`; `pending`: unknown tokens (0 or 1) before the sampled one."""
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
