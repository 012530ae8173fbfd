"""The sequences that have KV, and what happens when there are not enough blocks for them."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from rootlace.runtime.scheduler.kv import KVStore
from rootlace.runtime.scheduler.order import DepthFirst, depth_first
from rootlace.runtime.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Headroom:
    """Bounds of `reserve` in tokens, and the factor by which it shrinks per step."""

    least: float = 8.0
    most: float = 4096.0
    decay: float = 0.998


def by_order(sequence: Sequence) -> int:
    return sequence.order


class RunningSet:
    """Running and retracted sequences, both in order of first admission.

    *Headroom.* Every running sequence is promised the blocks of its remaining prompt and of its
    next `reserve` output tokens (fewer if it may not generate as many). A request is admitted if
    the available blocks cover those promises and the same for itself; with nothing running it
    always is. `reserve` doubles with every retraction and shrinks by 0.2 % per step, between 8 and
    4096 tokens (`Headroom`): so retractions stay rare without knowing how long outputs get.

    *Retraction.* The victim is, among those of the lowest priority, the sequence that would have to
    compute the fewest tokens again if all it does not share with other running ones were evicted;
    of equals the youngest. Never the oldest.
    """

    def __init__(self, kv: KVStore, headroom: Headroom) -> None:
        self._kv = kv
        self._headroom = headroom
        self.sequences: list[Sequence] = []
        self.retracted: list[Sequence] = []
        self.retractions = 0
        self.reserve = headroom.least
        self.most: int | None = None
        """How many ran when there was no room for more; None if there was for all who waited."""
        self._ordered: DepthFirst | None = None
        self._admissions = 0

    # ------------------------------------------------------------ coming and going

    def admit(self, sequence: Sequence) -> None:
        """Start `sequence`, or start it again if it was retracted."""
        if sequence.order < 0:
            sequence.order = self._admissions
            self._admissions += 1
            sequence.admitted()
        else:
            self.retracted.remove(sequence)
        self._kv.attach(sequence)
        insort(self.sequences, sequence, key=by_order)
        self._ordered = None

    def remove(self, sequence: Sequence) -> None:
        """`sequence` ends, running or retracted; what it computed stays cached."""
        if sequence in self.retracted:
            self.retracted.remove(sequence)
        else:
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """`sequence` stops running; what it computed stays cached."""
        self.sequences.remove(sequence)
        self._kv.release(sequence)
        self._ordered = None

    def retract(self, sequence: Sequence) -> None:
        """Take the sequence's blocks; it is admitted again before any new request."""
        self.leave(sequence)
        insort(self.retracted, sequence, key=by_order)
        self.retractions += 1
        self.reserve = min(2 * self.reserve, self._headroom.most)

    def stand_back(self, alone: Sequence) -> None:
        """All others stop running for a while, so that `alone` is computed alone."""
        for sequence in [one for one in self.sequences if one is not alone]:
            self.leave(sequence)
            insort(self.retracted, sequence, key=by_order)

    def jumped(self, sequence: Sequence) -> None:
        """Tokens were appended to a decoding sequence that are to be computed as a chunk.

        A few of them stay the sequence's own, as those that it decodes: to share them with others
        that come to the same costs more than computing them.
        """
        sequence.decoding = False
        sequence.jumped = sequence.length - sequence.computed <= self._kv.block_size
        if not sequence.jumped:
            self._kv.store(sequence)
            self._ordered = None

    def retreat(self, sequence: Sequence, length: int) -> None:
        """Forget the sequence's tokens behind `length`; it is admitted again before any new one.

        What it computed is in the tree then, so that little is computed again.
        """
        self.remove(sequence)
        sequence.shorten(length)
        insort(self.retracted, sequence, key=by_order)

    def forget(self, sequence: Sequence) -> None:
        """`sequence` ends, all KV being lost."""
        (self.retracted if sequence in self.retracted else self.sequences).remove(sequence)

    def restart(self) -> None:
        """All KV is lost: every sequence computes again what it had."""
        for sequence in self.sequences:
            sequence.forget_kv()
            insort(self.retracted, sequence, key=by_order)
        self.sequences = []
        self._ordered = None

    # ------------------------------------------------------------ order

    def moved(self) -> None:
        """A handle moved, so the order must be computed anew."""
        self._ordered = None

    def depth_first(self) -> DepthFirst:
        """The running sequences; a new object whenever the order may have changed."""
        if self._ordered is None:
            self._ordered = depth_first(self.sequences)
        return self._ordered

    # ------------------------------------------------------------ blocks

    def secure(self, *, may_retract: bool = True) -> list[Sequence] | None:
        """Give every sequence that decodes in the next step a slot for its next token; returns
        these. Retracts where there is none; None if that would be needed and is not allowed.
        A sequence whose pending token is its last one is not among them, nor one that waits for
        its pending tokens.

        If the oldest sequence is still in prefill, one more block is left for it.
        """
        size = self._kv.block_size
        while True:
            ready = [
                s
                for s in self.sequences
                if s.decoding
                and s.ending is None
                and (not s.pending or (s.length + s.pending < s.full and not s.stands_by))
            ]
            if not self.sequences:
                return ready
            growing = [s for s in ready if s.computed == s.table_len * size]
            oldest = self.sequences[0]
            stuck = not oldest.decoding and oldest.table_len * size <= oldest.computed
            if self._kv.make_room(len(growing) + stuck, growing[0] if growing else oldest):
                if growing:
                    self._kv.extend(growing)
                return ready
            if not may_retract:
                return None
            victim = min(self.sequences[1:], key=self._rank, default=None)
            if victim is not None:
                self.retract(victim)
            elif oldest.node is not None:
                self._kv.isolate(oldest)
                self._ordered = None
            else:
                raise RuntimeError(f"{oldest} holds all blocks and wants more")  # see max_length

    def _rank(self, sequence: Sequence) -> tuple[bool, int, int, int]:
        """Of victims, the lowest first. Retracting one helps that holds blocks of its own or wants
        one."""
        priority, loss = sequence.request.handling.priority, _loss(sequence)
        return not (loss > 0 or sequence.decoding), priority, loss, -sequence.order

    # ------------------------------------------------------------ headroom

    def relax(self) -> None:
        """Lower the reserve a little, once per step."""
        self.reserve = max(self._headroom.decay * self.reserve, self._headroom.least)

    def _ahead(self, sequence: Sequence) -> int:
        """The length up to which `sequence` is promised blocks."""
        outputs = 0 if sequence.ending is not None else sequence.max_tokens - sequence.outputs
        return sequence.target() + min(outputs, int(self.reserve))

    def promise(self, sequence: Sequence) -> int:
        """Blocks that a running sequence does not have yet and is promised."""
        return max(self._kv.blocks_for(self._ahead(sequence)) - sequence.table_len, 0)

    def promises(self) -> int:
        """Blocks promised to all running sequences. O(running)."""
        return sum(map(self.promise, self.sequences))

    def fits(self, sequence: Sequence, promises: int) -> bool:
        """Whether `sequence` may be admitted beside the `promises` to others."""
        if not self.sequences and not promises:
            return True
        return self.wanted(sequence) + promises <= self._kv.pool.available

    def wanted(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence would take, were it admitted."""
        return self._kv.cost(sequence, self._ahead(sequence))


def _loss(sequence: Sequence) -> int:
    """Computed tokens that no other running sequence shares."""
    node = sequence.node
    if node is None:
        return sequence.computed
    while node.locks == 1 and node.parent is not None:
        node = node.parent
    return sequence.computed - node.end
