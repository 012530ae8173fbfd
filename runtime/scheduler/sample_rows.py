"""What the rows of a step sample with: tokens, bans, masks, and where automata stand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SampleRow
from rootlace.runtime.scheduler.masks import StepMasks, walk
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.wire.protocol import SamplingParams

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
        self, rows: list[tuple[int, Sequence]]
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
        self, rows: list[tuple[int, Sequence]]
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

    def final(self, samples: list[SampleRow], live: dict[int, Sequence]) -> list[SampleRow]:
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

    def along(self, sequence: Sequence, draft: list[int]) -> list[Constraint | None]:
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
        self, row: int, sequence: Sequence, constraints: list[Constraint | None]
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
        self, sequences: list[Sequence], *, known: bool = False
    ) -> tuple[dict[Sequence, Constraint], Callable[[], None] | None]:
        """The constraints of those of `sequences` that are not late; all have a matcher. `known`:
        no token is pending."""
        found: dict[Sequence, Constraint] = {}
        masked: dict[Sequence, Matcher] = {}
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
    index: int, sequence: Sequence, pending: int, constraint: Constraint | None = None
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


def _automaton(sequence: Sequence, matcher: Matcher) -> AutomatonState | None:
    try:
        return matcher.automaton()
    except BaseException:  # a panic in a compiled library is no Exception
        log.exception("%r: its constraint does not say where its automaton stands", sequence)
        return None
