"""Admission: running and preempted requests, and prefill chunks.

 Limits (refuse) -> queue -> Prefill (admit, chunk) -> RunningSet (decode)
                                ^                         |
                                +-- preempt, rollback ----+

Sections: running set, time of a step, prefill.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from rootlace.runtime.cache.radix_tree import common_prefix
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.scheduler.batch import PlanBuilder
from rootlace.runtime.scheduler.drafter import Drafter
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.offload.fetching import MOST_FETCHES
from rootlace.runtime.scheduler.pacing import MeasuredCost, PromptPace
from rootlace.runtime.scheduler.queue import WaitingQueue, first_victim
from rootlace.runtime.scheduler.request import Counters, Ending, InFlightStep, RequestState
from rootlace.wire.errors import PinRefused
from rootlace.wire.protocol import CacheReport

BY_ORDER = attrgetter("order")


class Headroom(msgspec.Struct, frozen=True):
    """Bounds of `reserve` in tokens, and the factor by which `reserve` shrinks per step."""

    least: float = 8.0
    most: float = 4096.0
    decay: float = 0.998


class RunningSet:
    """Running and preempted requests, both in order of first admission.

    *Headroom.* Each running request is promised the blocks of its remaining prompt and next
    outputs. `reserve` limits these outputs, and so does the request's own maximum. Admission
    requires that the available blocks cover all promises and the new request's. With nothing
    running, admission always succeeds. `reserve` doubles with every preemption and shrinks by 0.2 %
    per step, between 8 and 4096 tokens (`Headroom`). So preemptions stay rare although output
    lengths are unknown.

    *Preemption.* See `queue.first_victim`. The oldest request is never preempted.
    """

    def __init__(self, kv: KVStore, headroom: Headroom) -> None:
        self._kv = kv
        self.headroom = headroom
        self.sequences: list[RequestState] = []
        self.preempted: list[RequestState] = []
        self.preemptions = 0
        self.reserve = headroom.least
        self.prefilling = False
        """Whether a running sequence still had prompt tokens to compute at the last `secure`."""
        self.ordered: list[RequestState] | None = None
        """The running sequences in depth-first order; None once the order may have changed."""
        self._admissions = 0

    # ------------------------------------------------------------ coming and going

    def admit(self, sequence: RequestState) -> None:
        """Start a new or a preempted `sequence`."""
        if sequence.order < 0:
            sequence.order = self._admissions
            self._admissions += 1
            tokens, recalled = sequence.tokens[: sequence.length], sequence.recalled
            if sequence.predicted is not None or recalled is not None:
                own = None if recalled is None else recalled.index.open(sequence.text_owner, tokens)
                sequence.drafter = Drafter(sequence.predicted, sequence.prompt_len, recalled, own)
        else:
            self.preempted.remove(sequence)
        if self._kv.enabled:
            sequence.node = self._kv.tree.enter(sequence.namespace)
        sequence.detached = not self._kv.enabled
        insort(self.sequences, sequence, key=BY_ORDER)
        self.ordered = None

    def remove(self, sequence: RequestState) -> None:
        """End `sequence`, running or preempted; its computed tokens stay cached."""
        if sequence in self.preempted:
            self.preempted.remove(sequence)
            return
        self.sequences.remove(sequence)
        self._kv.release(sequence)
        self.ordered = None

    def preempt(self, sequence: RequestState) -> None:
        """Release the blocks of `sequence` and put the sequence before all new requests."""
        self.remove(sequence)
        insort(self.preempted, sequence, key=BY_ORDER)
        self.preemptions += 1
        self.reserve = min(2 * self.reserve, self.headroom.most)

    def stand_back(self, alone: RequestState, max_rows: int) -> None:
        """Stop running requests so that `alone` can be computed alone. Stops the requests that do
        not decode. Stops all if they leave no blocks, or no row of `max_rows`, for `alone`."""
        others = [one for one in self.sequences if one is not alone]
        fits_beside = alone in self.sequences or self.fits(alone, self.promises())
        for sequence in others:
            if not (fits_beside and sequence.decoding and len(others) < max_rows):
                self.remove(sequence)
                insort(self.preempted, sequence, key=BY_ORDER)

    def rollback(self, sequence: RequestState, length: int) -> None:
        """Drop the tokens of `sequence` behind `length` and put the sequence before all new
        requests. The computed tokens are in the tree by then, so few tokens are computed again."""
        self.remove(sequence)
        sequence.shorten(length)
        insort(self.preempted, sequence, key=BY_ORDER)

    def forget(self, sequence: RequestState) -> None:
        """End `sequence` after all KV was lost."""
        (self.preempted if sequence in self.preempted else self.sequences).remove(sequence)

    def restart(self) -> None:
        """Make every running sequence compute its tokens again after all KV was lost."""
        for sequence in self.sequences:
            sequence.forget_kv()
            insort(self.preempted, sequence, key=BY_ORDER)
        self.sequences = []
        self.ordered = None

    # ------------------------------------------------------------ blocks

    def secure(
        self,
        alone: RequestState | None = None,
        *,
        others: bool = False,
        may_preempt: bool = True,
        turns: Turns | None = None,
        waiting: bool = False,
    ) -> list[RequestState] | None:
        """Give every sequence of the next decode step a slot for its next token; return these
        sequences.

        `alone`: with it, no other sequence is in the step; with `others` too, all but it are.
        `turns`: only the sequences whose turn it is decode. `waiting`: other requests wait for
        admission.

        Sequences are preempted if slots are missing; returns None if `may_preempt` forbids that.
        Sequences whose pending token is the last, or that wait for pending tokens, are excluded. If
        the oldest sequence is still in prefill, one more block is left for it.
        """
        size = self._kv.block_size
        if alone is not None and not others:
            turns = None
        while True:
            ready: list[RequestState] = []
            self.prefilling = False
            for s in self.sequences:
                if not s.decoding:
                    self.prefilling = True
                elif alone is not None and others is (s is alone):
                    continue
                elif s.ending is None and (
                    not s.pending or (s.length + s.pending < s.full and not s.stands_by)
                ):
                    ready.append(s)
            if not self.sequences:
                return ready
            if turns is not None and len(ready) > 1:
                prompts = self.prefilling or bool(self.preempted) or waiting
                ready = turns.part(ready, prompts)
            growing = [s for s in ready if s.computed == s.table_len * size]
            oldest = self.sequences[0]
            stuck = not oldest.decoding and oldest.table_len * size <= oldest.computed
            if not growing and not stuck:
                break
            if self._kv.make_room(len(growing) + stuck, growing[0] if growing else oldest):
                if growing:
                    self._kv.extend(growing)
                break
            if not may_preempt:
                return None
            victim = first_victim(self.sequences)
            if victim is not None:
                self.preempt(victim)
            elif oldest.node is not None:
                self._kv.isolate(oldest)
                self.ordered = None
            else:
                raise RuntimeError(f"{oldest} holds all blocks and wants more")  # see max_length
        if turns is None or not ready:
            return ready
        turns.last = ready[-1].order
        return sorted(ready, key=BY_ORDER)

    # ------------------------------------------------------------ headroom

    def _ahead(self, sequence: RequestState) -> int:
        """Return the length up to which `sequence` is promised blocks."""
        outputs = 0 if sequence.ending is not None else sequence.max_tokens - sequence.outputs
        return sequence.target() + min(outputs, int(self.reserve))

    def promise(self, sequence: RequestState) -> int:
        """Return the blocks promised to a running sequence and not allocated yet."""
        return max(self._kv.blocks_for(self._ahead(sequence)) - sequence.table_len, 0)

    def promises(self) -> int:
        """Return the blocks promised to all running sequences. O(running)."""
        return sum(map(self.promise, self.sequences))

    def fits(self, sequence: RequestState, promises: int) -> bool:
        """Return whether `sequence` may be admitted beside the `promises` to running sequences."""
        return self.wanted(sequence) + promises <= self._kv.pool.available

    def wanted(self, sequence: RequestState) -> int:
        """Return the blocks that admitting a waiting sequence would take."""
        return self._kv.cost(sequence, self._ahead(sequence))


# Time of a step -----------------------------------------------------------------------------------


_LEAST_CHUNK = 32
"""Least prompt tokens of a step, at any cost. Reading the weights takes as long as some 5 tokens on
a CPU, so large models spend little time on the weights."""
_FIRST_CHUNK = 64
"""Prompt tokens of the first step, before any measurement. Later steps have at most twice the
tokens of the largest recent step, so that forecasts stay near measured sizes."""
_AIMED = 0.95
"""Planned share of a step's time bound: forecasts miss by some 5 %."""
_LENGTH = attrgetter("length")
_LEAST = 0.25
"""Least share of a step's time bound for prompts, beside any number of decode rows."""
_EARLY = 0.25
"""Share of a step's prompt budget for short requests of clients without a row, before the turns of
other clients."""
_ROWS_TO_STEP = 20
"""Decode time, in empty steps, beyond which decode rows take turns: turns cost 5 to 10 %."""


@dataclass(slots=True)
class Turns:
    """Decode rows in turns: rows that need more than `limit` seconds by `measured` decode in equal
    parts."""

    limit: float
    measured: MeasuredCost
    last: int = -1
    """Admission number of the row that decoded last."""

    def part(self, rows: list[RequestState], prompts: bool) -> list[RequestState]:
        """Return the rows of the next step, the first in turn first. `rows`: all, in order of
        admission. With `prompts` to compute, a part of each step is left for prompts."""
        cost = self.measured.cost
        limit = self.limit * (1 - _LEAST if prompts else 1) / self.measured.levels[prompts]
        decoding = cost.decode * len(rows) + cost.context * sum(map(_LENGTH, rows))
        parts = math.ceil(decoding / max(limit - cost.step, _ROWS_TO_STEP * cost.step))
        if parts < 2 or not self.measured.steps:
            return rows
        at = bisect_right(rows, self.last, key=BY_ORDER)
        return (rows[at:] + rows[:at])[: -(-len(rows) // parts)]


class StepBudget(msgspec.Struct):
    """Budget of a step for prompts: `tokens`, which cost `seconds` by `cost`.

    `seconds` is divided by the level of steps with prompts; `cost` is not. `cost` None: only the
    tokens are bounded.
    """

    tokens: int
    seconds: float = math.inf
    cost: StepCost | None = None

    @property
    def open(self) -> bool:
        """Return whether another token fits."""
        return self.tokens > 0 and self.seconds > 0

    @classmethod
    def of(
        cls, tokens: int, limit: float, measured: MeasuredCost, rows: list[RequestState]
    ) -> StepBudget:
        """Return the budget for prompts of a step of `limit` seconds (0: any) beside decode `rows`.

        The budget is at least a quarter of the limit, so that prompts make progress. Within the
        limit, it is also at least the cost of an empty step: steps of one size do not separate this
        cost from the rows' cost.
        """
        if not limit:
            return cls(tokens)
        limit *= _AIMED / measured.levels[True]
        tokens = min(tokens, max(_FIRST_CHUNK, int(2 * measured.largest)))
        cost = measured.cost
        if not measured.steps:
            return cls(tokens, cost=cost)
        lengths = sum(map(_LENGTH, rows))
        decoding = cost.step + cost.decode * len(rows) + cost.context * lengths
        seconds = max(limit - decoding, min(cost.step, limit), limit * _LEAST)
        return cls(tokens, seconds, cost)

    def split(self, parts: int) -> StepBudget:
        """Take out one of `parts` equal parts, of at least one token."""
        part = replace(self, tokens=-(-self.tokens // parts), seconds=self.seconds / parts)
        self.tokens -= part.tokens
        self.seconds -= part.seconds if math.isfinite(part.seconds) else 0.0
        return part

    def give_back(self, part: StepBudget) -> None:
        """Add the rest of a part to the budget."""
        self.tokens += part.tokens
        if math.isfinite(part.seconds):
            self.seconds += part.seconds

    def fitting(self, sequence: RequestState, start: int) -> int:
        """Return the number of tokens of `sequence` from `start` on that fit."""
        cost = self.cost
        if cost is None or math.isinf(self.seconds):
            return self.tokens
        least = min(_LEAST_CHUNK, self.tokens)
        count = _within(self.seconds, cost.prefill + cost.pair * start, cost.pair)
        # Tokens before the first scored one cost less.
        plain = max(sequence.score_next - 1 - start, 0)
        if count > plain and sequence.score_next < sequence.score_stop:
            left = self.seconds - self._price(start, plain, 0)
            each = cost.prefill + cost.score + cost.pair * (start + plain)
            count = plain + _within(left, each, cost.pair)
        return int(max(min(count, self.tokens), least))

    def spend(self, start: int, count: int, scored: int) -> None:
        """Note a chunk of `count` tokens from `start` on, `scored` of which get scores."""
        self.tokens -= count
        if self.cost is not None:
            self.seconds = max(self.seconds - self._price(start, count, scored), 0.0)

    def _price(self, start: int, count: int, scored: int) -> float:
        cost = self.cost
        assert cost is not None
        if count == 1:  # computed as a decode row
            return cost.decode + cost.context * start + cost.score * scored
        pairs = count * (start + count / 2)
        return cost.prefill * count + cost.pair * pairs + cost.score * scored


def _within(seconds: float, each: float, pair: float) -> float:
    """Return how many tokens fit into `seconds`: the first costs `each`, each further one `pair`
    more."""
    if pair > 0:
        return (math.sqrt(each * each + 2 * pair * max(seconds, 0.0)) - each) / pair
    return seconds / each if each > 0 else math.inf


# Prefill ------------------------------------------------------------------------------------------


_LANES = 2
"""Most prompts cut at a time, if steps are short. Prompts that fit into one step go beside these,
and so does one prompt shorter than the longest rest."""
_LEVELS = 3
"""Names in a client's place: key or address, the key's address, connection."""
_SPARE_ROWS = 16
"""Divisor of the rows: one row in `_SPARE_ROWS` is kept for clients without a row."""
MOST_LOOKED_AT = 64
"""Most waiting requests that a step passes over, since looking at thousands would outlast the step.
"""


@dataclass(slots=True)
class Prefill:
    """Planner of prefill chunks, which fill the budget left by decode rows.

    The order is: sequences in prefill by admission, preempted sequences, waiting sequences. A chunk
    cut by blocks or budget ends the phase. The next sequence might need the tokens behind the cut
    and would compute these tokens a second time.

    With steps bounded in time, a long prompt takes many steps and shares them. Each sequence in
    prefill gets an equal part of the step, and all other requests together get one such part. The
    other requests are those that fit into one step, and few long requests of other clients. A
    request that needs the tokens behind a cut waits for the tokens.
    """

    kv: KVStore
    running: RunningSet
    waiting: WaitingQueue
    flights: deque[InFlightStep]
    """Planned steps without a commit."""
    counters: Counters
    max_rows: int
    clock: Callable[[], float]
    pace: PromptPace
    complete: Callable[[RequestState], None]
    """Callback that ends an admitted sequence that needs no computation."""
    longest: Callable[[RequestState], int]
    """Callback for the longest length of other sequences; see `Retention.check_pin`."""

    def plan(
        self, builder: PlanBuilder, budget: StepBudget, alone: RequestState | None = None
    ) -> None:
        """Add chunks within `budget`; if `alone` is given, admit no other sequence."""
        running = self.running
        begun: list[RequestState] = []
        for one in running.sequences if running.prefilling else ():
            if not one.decoding and (alone is None or one is alone):
                begun.append(one)
        may_admit = running.preempted or self.waiting.count
        if not may_admit or alone in running.sequences:
            self._go_on(begun, budget, builder)
            return
        if not begun or budget.cost is None:
            if not begun or self._go_on(begun, budget, builder):
                self._admit(builder, budget, alone, [])
            return
        long = [
            one
            for one in begun
            if one.target() - one.computed > budget.fitting(one, one.computed) // (len(begun) + 1)
        ]
        if self._go_on([one for one in begun if one not in long], budget, builder):
            part = budget.split(len(long) + 1)
            self._admit(builder, part, alone, long)
            budget.give_back(part)
            self._go_on(long, budget, builder)

    def _go_on(self, begun: list[RequestState], budget: StepBudget, builder: PlanBuilder) -> bool:
        """Plan chunks of sequences in prefill; return whether others may follow. With steps bounded
        in time, the sequences share the budget."""
        for at, sequence in enumerate(begun):
            if not budget.open or sequence.finished:
                continue
            parts = 1 if budget.cost is None else len(begun) - at
            part = budget if parts == 1 else budget.split(parts)
            planned = self._chunk(sequence, part, builder)
            if parts > 1:
                budget.give_back(part)
            if not planned:
                return False
        return budget.open

    def _admit(
        self,
        builder: PlanBuilder,
        budget: StepBudget,
        alone: RequestState | None,
        long: list[RequestState],
    ) -> None:
        """Admit sequences until budget, rows or blocks run out; `long` ones are in prefill.

        Deferred sequences do not stop later ones. Deferred are sequences whose blocks are being
        read (their space stays reserved) and sequences for which `_waits` is true.
        """
        if self.waiting.count > 1:
            self.waiting.refresh()
        deferred: list[RequestState] = []
        running, preempted = self.running, self.running.preempted
        promises = running.promises()
        in_turns, shorts = budget.seconds * (1 - _EARLY), self._shorts(budget, long)
        while budget.open and len(running.sequences) < self.max_rows:
            following, newcomer = alone or (preempted[0] if preempted else None), False
            bounded = budget.cost is not None and alone is None and running.sequences
            early = None
            if following is None:
                following, newcomer = self._peek(budget)
                if bounded and following and not newcomer and budget.seconds > in_turns:
                    early = self._early(following, budget, promises, shorts)
            if following is None:
                break
            following = early or following
            beside = running.sequences or promises  # otherwise it always fits
            if beside and not running.fits(following, promises):
                break
            if following.order >= 0 and self._awaits(following):
                break
            if bounded and self._waits(following, budget, long):
                if newcomer or following.order >= 0 or len(deferred) >= MOST_LOOKED_AT:
                    break
                if len(deferred) >= MOST_FETCHES:
                    self.waiting.hold(following)
                else:
                    self.waiting.defer(following)
                deferred.append(following)
                continue
            tiering = self.kv.tiering
            if tiering.active and tiering.fetching.holds_back(following):
                if alone is not None or following.order >= 0 or len(deferred) >= MOST_FETCHES:
                    break
                self.waiting.defer(following)
                deferred.append(following)
                promises += running.wanted(following)
                continue
            if following.order < 0:
                self.waiting.take(following, in_turn=not newcomer and early is None)
                following.newcomer = newcomer
                following.queued = self.clock() - following.arrived
            running.admit(following)
            planned = self._chunk(following, budget, builder)
            if tiering.active:
                tiering.let_go(following)
            if alone is not None or not planned:
                break
            if not (following.decoding or following.finished):  # cut
                break
            if not preempted and not self.waiting.count:
                break
            if not following.finished:
                promises += running.promise(following)
        if deferred:
            self.waiting.restore(deferred)

    def _peek(self, budget: StepBudget) -> tuple[RequestState | None, bool]:
        """Return the waiting request to admit next, and whether it gets a row kept for newcomers.

        With steps bounded in time, the last rows are kept for clients without a row: half of these
        rows for connections, the others for keys and addresses. Each client whose only row is such
        a row reduces the number of kept rows by one.
        """
        running = self.running.sequences
        reserve = spare = self.max_rows // _SPARE_ROWS
        free = self.max_rows - len(running)
        if free <= reserve:
            had = {one.place for one in running if not one.newcomer}
            reserve -= len({one.place for one in running if one.newcomer} - had)
        if budget.cost is None or free > reserve:
            return self.waiting.peek(), False
        levels = _LEVELS if reserve > spare // 2 else 1
        return self.waiting.peek_beside({one.place[:levels] for one in running}, levels), True

    def _early(
        self,
        following: RequestState,
        budget: StepBudget,
        promises: int,
        shorts: Iterator[RequestState],
    ) -> RequestState | None:
        """Return the request of `shorts` to admit before `following`, the request in turn; None if
        none.

        Only with steps bounded in time, and if `following` keeps a row and its blocks.
        """
        running = self.running.sequences
        if self.max_rows - len(running) <= max(2 * (self.max_rows // _SPARE_ROWS), 1):
            return None
        held = any(one.place == following.place for one in running)
        if not held and following.length <= budget.fitting(following, 0):
            return None
        short = next(shorts, None)
        if short is None:
            return None
        if short.request.handling.priority < following.request.handling.priority:
            return None
        taken = promises + self.running.wanted(short)
        return short if self.running.fits(following, taken) else None

    def _shorts(self, budget: StepBudget, long: list[RequestState]) -> Iterator[RequestState]:
        """Yield waiting requests of clients without a row that fit into this step, in order of
        turns. Yields at most one request of a client, of the first clients alone."""
        fetching = self.kv.tiering.fetching if self.kv.tiering.active else None
        had = {one.place for one in self.running.sequences}
        for queue in islice(self.waiting.beside(had, _LEVELS), MOST_LOOKED_AT):
            first = queue.peek() if queue.requests else None
            if first is None or any(one.place == first.place for one in self.running.sequences):
                continue
            whole = first.length <= budget.fitting(first, 0)
            start = 0 if whole else self.kv.estimate(first)
            if first.length - start > budget.fitting(first, start) or self._waits(
                first, budget, long
            ):
                continue
            if fetching is not None and fetching.holds_back(first):
                return  # reads for requests in turn come first
            yield first

    def _waits(self, following: RequestState, budget: StepBudget, long: list[RequestState]) -> bool:
        """Return whether `following` waits for other requests; only with steps bounded in time."""
        if not long:
            return False
        start = following.computed if following.order >= 0 else self.kv.estimate(following)
        for one in long:
            if one.namespace == following.namespace:
                limit = min(following.match_limit(), one.length)
                shared = common_prefix(following.tokens[:limit], one.tokens[:limit])
                if shared > max(one.computed, start):
                    return True
        rest = following.target() - start
        if rest <= budget.fitting(following, start):
            return False
        if any(one.place == following.place for one in long):
            return True
        if len(long) < _LANES:
            return False
        return len(long) > _LANES or rest > max(one.target() - one.computed for one in long)

    def _chunk(self, sequence: RequestState, budget: StepBudget, builder: PlanBuilder) -> bool:
        """Plan tokens of `sequence` within `budget`; False if blocks are lacking."""
        forced = sequence.jumped
        if sequence.request.report and sequence.report is None:
            self._explain(sequence)
        if not forced:  # the prompt is computed
            if self.kv.rematch(sequence):
                self.running.ordered = None
            self.counters.cached_tokens += sequence.count_prompt(cached=True)
        target = sequence.target()
        wanted = target - sequence.computed
        if not wanted:  # every token is cached
            if not self._awaits(sequence) and self._may_pin(sequence, 0):
                self.pin(sequence)
                self.complete(sequence)
            return True
        within = budget.fitting(sequence, sequence.computed)
        growth = self.kv.max_growth(sequence)
        count = min(wanted, within, growth)
        if count <= 0:
            return False
        if not sequence.pinned and not self._may_pin(sequence, count):
            return True
        self.kv.grow(sequence, count, builder)
        end = sequence.computed + count
        complete = end == target
        scores = (
            max(sequence.score_next, sequence.computed + 1),
            min(end + 1, sequence.score_stop),
        )
        pool = sequence.pool
        pooled = (0, 0) if pool is None else pool.plan(sequence.computed, end)
        builder.add_chunk(sequence, count, complete=complete, scores=scores, pooled=pooled)
        sequence.score_next = max(scores)
        sequence.computed = end
        sequence.decoding = complete
        if forced:
            sequence.jumped = not complete
        else:
            self.kv.store(sequence, builder)
            if not sequence.pinned:
                self.pin(sequence)
            if complete and self.waiting.count:
                self.waiting.computed(sequence)
            self.running.ordered = None
            sequence.count_prompt(cached=False)
        self.counters.computed_tokens += count
        budget.spend(end - count, count, max(scores[1] - scores[0], 0))
        return complete or count < growth

    def pin(self, sequence: RequestState) -> None:
        """Pin the prompt of `sequence`, if requested and the whole prompt is in the tree."""
        if not sequence.pinned and sequence.tree_len >= sequence.prompt_len:
            sequence.pinned = True
            self.kv.retention.pin(sequence)

    def _may_pin(self, sequence: RequestState, count: int) -> bool:
        """Return whether the prompt can be pinned if `count` more tokens complete the prompt. A pin
        can become impossible after the request was accepted; the request then ends."""
        if sequence.pinned or sequence.computed + count < sequence.prompt_len:
            return True
        try:
            self.kv.retention.check_pin(sequence, self.longest(sequence))
        except PinRefused as error:
            sequence.ending = Ending("error", code=error.code, error=str(error))
            self.complete(sequence)
            return False
        return True

    def _explain(self, sequence: RequestState) -> None:
        scope = sequence.request.report
        assert scope
        last = sequence.prompt_len - 1
        limit = min(sequence.match_limit(), sequence.prompt_len)
        report = self.kv.explain(sequence.namespace, sequence.tokens, limit, scope)
        if report.reason == "whole" and limit < last:
            report = CacheReport(report.matched, last, "scored")
        saved = self.pace.seconds(report.matched)
        restored = min(sequence.restored, report.matched)
        sequence.report = msgspec.structs.replace(report, saved_seconds=saved, from_disk=restored)

    def _awaits(self, sequence: RequestState) -> bool:
        """Return whether planned steps still return something for `sequence`."""
        return bool(sequence.pending) or any(flight.awaits(sequence) for flight in self.flights)
