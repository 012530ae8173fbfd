"""A step between its plan and its commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.scheduler.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """Whom a plan under way is for.

    `sampled` are the sequences of the plan's samples, with the epochs for which these count;
    `scored` those of its prompt scores, with the first token and the end of what is scored;
    `pooled` those of its pooled rows, with the first token; `complete` those that end with this
    step without a sample.
    """

    plan: StepPlan
    rows: list[Sequence]
    sampled: list[tuple[Sequence, int]]
    scored: list[tuple[Sequence, int, int]]
    complete: list[Sequence]
    pooled: list[tuple[Sequence, int]] = field(default_factory=list)
    begun: float = 0.0
    """By the scheduler's clock."""

    def wanted(self) -> list[tuple[int, Sequence]]:
        """The samples that count, as (index, sequence)."""
        return [
            (at, sequence)
            for at, (sequence, epoch) in enumerate(self.sampled)
            if sequence.epoch == epoch and not sequence.finished
        ]

    def awaits(self, sequence: Sequence) -> bool:
        """Whether something but a sample is to come of it for `sequence`."""
        found = [s for s, _, _ in self.scored] + [s for s, _ in self.pooled]
        return sequence in self.complete or any(s is sequence for s in found)

    def drop(self) -> None:
        """Give the step up: what it was to find has to be found again.

        Waits for the masks being filled, since their matchers go on.
        """
        if self.plan.wait_for_masks is not None:
            self.plan.wait_for_masks()
        for _, sequence in self.wanted():
            sequence.drop_pending()
        for sequence, start, _ in self.scored:
            sequence.score_next = min(sequence.score_next, start)
        for sequence, start in self.pooled:
            assert sequence.pool is not None
            sequence.pool.next = min(sequence.pool.next, start)
