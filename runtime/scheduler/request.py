"""The state of one request: tokens and blocks, sampling and constraint, bookkeeping.

Sections: pooling, request state, limits, in-flight step, counters.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.runtime.cache.node import Node
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineRequest, Pooling, kv_namespace
from rootlace.runtime.contracts.plan import StepPlan, TokenScores
from rootlace.runtime.scheduler.drafter import Drafter, PredictedText, Recalled
from rootlace.wire.errors import ContextLengthExceeded, InvalidRequest
from rootlace.wire.protocol import DRAFT_SOURCES, CacheReport
from rootlace.wire.sampling import PARAMETERS

# Pooling ------------------------------------------------------------------------------------------


class Pool:
    """Hidden states of one request, gathered chunk by chunk into a vector.

    `next`: first token without a computed state; a cached prefix may not reach beyond this token. A
    mean needs every token, the other poolings need the last one.
    """

    __slots__ = ("_sum", "count", "labels", "length", "next")

    def __init__(self, pooling: Pooling, length: int) -> None:
        self.length = length
        self.labels = pooling == "labels"
        self.next = 0 if pooling == "mean" else length - 1
        self.count = 0
        self._sum: np.ndarray | None = None

    def plan(self, start: int, stop: int) -> tuple[int, int]:
        """Return first and end of the tokens in `start : stop`, computed now, that the pooling
        needs."""
        first = max(self.next, start)
        self.next = max(self.next, stop)
        return first, stop

    def take(self, states: np.ndarray) -> None:
        """Add states of the next tokens: float32 [tokens, size].

        States are added one by one, so that the sum does not depend on chunk borders.
        """
        if self._sum is None:
            self._sum = np.zeros(states.shape[1])
        for state in states:
            self._sum += state
        self.count += len(states)

    def vector(self) -> np.ndarray:
        """Return the pooled vector, float32 [size]."""
        assert self._sum is not None and self.next == self.length
        return (self._sum / self.count).astype(np.float32)


# Request state ------------------------------------------------------------------------------------


_HISTORY = [each for each in PARAMETERS.values() if each.history]
_PENALTIES = attrgetter(*(each.name for each in _HISTORY))
_NO_PENALTIES = tuple(each.default for each in _HISTORY)


Place = tuple[str, ...]
"""Source of a request: key or address, then `EngineRequest.origin`; "" for missing parts."""


class Ending(msgspec.Struct, frozen=True):
    """Reason of a request's end; fields as in `EngineOutput`."""

    finish: str
    matched: int | None = None
    code: str = ""
    error: str = ""


@dataclass(slots=True)
class Draft:
    """Draft tokens that a step in flight computes behind the first `right` tokens of a sequence.

    `right` grows with sampled tokens that agree. `planned`: draft tokens in the plan; the last ones
    are left out if their masks took too long. `cost`: in tokens, relative to a right token.
    `source`: index of `DRAFT_SOURCES`.
    """

    tokens: list[int]
    start: int
    right: int
    planned: int
    cost: float
    source: int

    def agreed(self, tokens: np.ndarray, length: int) -> int:
        """Count the leading tokens of the sequence, of `length`, that agree with the computed
        draft."""
        end = min(length, self.start + len(self.tokens))
        while self.right < end and tokens[self.right] == self.tokens[self.right - self.start]:
            self.right += 1
        return self.right


@dataclass(slots=True)
class Agreement:
    """Decaying sums of the draft model's checked tokens, and of the wrong ones among them."""

    tried: float = 0.0
    wrong: float = 0.0

    def note(self, right: int, wrong: int) -> None:
        """Record `right` right tokens of a draft, then `wrong` (0 or 1) a wrong one."""
        decay = _AGREEMENT_KEPT ** (right + wrong)
        self.wrong = decay * self.wrong + wrong
        self.tried = decay * self.tried + right + wrong

    def chance(self, usual: float) -> float:
        """Return the chance that the next draft token is right; `usual` before the first check."""
        wrong = self.wrong + _USUAL_TRIED * (1 - usual)
        return 1 - wrong / (self.tried + _USUAL_TRIED)


_AGREEMENT_KEPT, _USUAL_TRIED = 0.97, 6.0
"""Weight of an older token beside the next one; number of tokens that the prior counts for."""


class OneRequest(NamedTuple):
    """Owner of a text that only its own request may draft from."""

    namespace: Hashable
    rid: int


class RequestState:
    """State of one request, from `add` to its last update.

     tokens   prompt ........................ | output ...... | pending |
              0 ...... tree_len .... computed .... length
     table    | tree path | own blocks     |

    `tokens[:length]` are prompt and output. The KV of the first `computed` tokens is in memory once
    the steps in flight end. `table[:table_len]` are the blocks. The handle `node` ends at
    `tree_len <= computed`. The table up to `tree_len // block_size` is that of the tree path; the
    sequence itself refers to the blocks behind. A *detached* sequence has no handle and refers to
    all its blocks.

    Steps in flight sample the `pending` tokens behind `length`. The last pending token is sample
    `sampled_at` of the step planned last. With one pending token a step may already compute the
    next one: then `computed` is beyond `length`. A sample counts if `epoch` has not changed since
    the plan. With a `draft` all samples of the step are pending. The drafted tokens lie behind
    `length` in `tokens` and are computed.
    """

    def __init__(
        self,
        request: EngineRequest,
        matcher: Matcher | None,
        number: int,
        *,
        jumps: bool,
        arrived: float,
        max_length: int,
        adapter: int = -1,
    ) -> None:
        """Make the state of a request. `matcher` has taken in the request's `output_ids`.

        `jumps`: tokens forced by the matcher are appended without sampling. A sequence of
        `max_length` tokens ends.
        """
        params = request.params
        outputs = len(request.output_ids)
        assert params.max_tokens is not None
        self.max_tokens = params.max_tokens
        self.request = request
        self.params = params
        self.rid = request.rid
        self.adapter = adapter
        """Number of the adapter; -1: none."""
        self.namespace = kv_namespace(request.namespace, request.adapter)
        cache = request.handling.cache
        forgotten = cache.ttl is not None and not cache.pin  # with a pin, `ttl` is the pin's time
        self.text_owner: Hashable = (
            OneRequest(self.namespace, self.rid) if forgotten else self.namespace
        )
        """Owner of the request's text in the index: with a time to live, the request alone."""
        origin = request.origin
        self.place: Place = (request.client, *origin, *("", "")[len(origin) :])
        self.program = 0
        """The cache's id of the request's program."""
        self.number = number
        """Arrival number of the request."""
        self.arrived = arrived
        self.order = -1
        """Admission number of the sequence, kept through preemption."""
        self.newcomer = False
        """Whether the row was kept for clients without a row."""
        self.queued: float | None = None

        self.prompt_len = len(request.token_ids)
        self.outputs = outputs
        self.length = self.prompt_len + outputs
        self.full = min(self.prompt_len + self.max_tokens, max_length)
        """Length at which the sequence ends, with any tokens."""
        self.tokens = np.empty(self.length + 16, np.int32)
        self.tokens[: self.prompt_len] = request.token_ids
        self.tokens[self.prompt_len : self.length] = request.output_ids
        self.last = int(self.tokens[self.length - 1])
        self.stops = frozenset(params.stop_token_ids)
        self.matcher = matcher
        self.jumps = matcher is not None and jumps
        self.held = matcher is not None and matcher.can_rollback
        """Whether the constraint may roll outputs back; the outputs are then emitted at the end."""
        self.ending: Ending | None = None
        """Ending of a sequence that samples no more tokens, while tokens are still to be computed.
        """
        if outputs >= self.max_tokens:
            self.ending = Ending("length")
        elif matcher is not None and not matcher.place.unfinished and matcher.is_finished():
            self.ending = Ending("stop")

        # A resumed request emitted its prompt's scores before.
        first = params.prompt_logprobs_from
        self.score_from = self.prompt_len if first is None or outputs else first
        self.score_next = max(self.score_from, 1)
        self.score_stop = self.prompt_len
        self.prompt_scores: list[TokenScores] = []
        self.pool = None if request.pooling == "none" else Pool(request.pooling, self.prompt_len)
        self.emitted = self.length
        self.emitted_at = 0.0
        self.forced: list[int] = []
        self.output_scores: list[TokenScores] = []

        self.covered = 0
        """Prompt tokens counted so far, cached or computed; each token counts once."""
        self.cached_tokens = 0
        self.restored = 0
        """Tokens read back from offload levels for this request."""
        self.first_cached = 0
        """Prompt tokens cached at the first admission."""
        self.report: CacheReport | None = None
        """Explanation of the cached prefix at admission, if requested."""
        self.announced = False
        self.lose_pin()
        self.finished = False
        self.accusations = 0
        """Failed steps of several requests that named no cause and included this request."""
        self.suspected_until = 0
        """Computed length up to which the sequence is computed alone (`Suspects`)."""
        self.pending = 0
        self.sampled_at = -1
        self.epoch = 0
        self.draft: Draft | None = None
        self.predicted: PredictedText | None = None
        """Text predicted by the client, if the request may have drafts."""
        self.recalled: Recalled | None = None
        """Index of other texts, if the request may have drafts."""
        self.drafter: Drafter | None = None
        """Drafter that follows the output through these texts, once the request is admitted."""
        self.agreement = Agreement()
        """Rate of right tokens among the draft model's recent ones."""
        self.stands_by = False
        """Whether the sequence skips steps planned while one of its tokens is pending."""
        self.accepted: list[tuple[int, int]] = []
        """Positions and sources of accepted draft tokens that were not emitted yet, ascending."""
        self.rejected = [0] * len(DRAFT_SOURCES)
        """Draft tokens of each source that were rejected since the last update."""
        self.fault: BaseException | None = None
        """Failure of the constraint; the sequence ends with its next token."""
        self.stepped = False
        """Whether the row planned last carries an automaton state that the device advances."""
        self.penalised = _PENALTIES(params) != _NO_PENALTIES
        """Whether sampling depends on all tokens before."""
        self.simple = not (
            params.temperature > 0 or params.logit_bias or params.min_tokens or self.penalised
        )
        """Whether sampling takes the best allowed token."""
        self.table = np.empty(8, np.int32)
        self.forget_kv()

    def lose_pin(self) -> None:
        """Record that the prompt is not pinned, or no longer."""
        self.pinned = not self.request.handling.cache.pin
        """Whether the prompt is pinned, or needs no pin."""
        self.pin = ""
        """Id of the pin, once there is one."""

    def forget_kv(self) -> None:
        """Start without KV; tokens, scores and counts stay."""
        self.node: Node | None = None
        self.tree_len = 0
        self.computed = 0
        self.table_len = 0
        self.detached = False
        self.sought = False
        """Whether offload levels were searched for the missing blocks."""
        self.decoding = False
        self.jumped = False
        """Whether a few forced tokens are being computed outside of the tree, as decoded tokens
        are."""

    def drop_pending(self) -> None:
        """Ignore samples in flight, as another token follows."""
        self.epoch += 1
        self.pending = 0
        if self.draft is not None:
            self.close_draft()

    def fail(self, fault: BaseException) -> None:
        """End the sequence with its next token, as the constraint's state is unknown."""
        self.fault, self.matcher = fault, None

    def close_draft(self) -> int:
        """Close the draft; return the count of its tokens that were sampled."""
        draft, self.draft = self.draft, None
        assert draft is not None
        end = draft.agreed(self.tokens, self.length)
        self.accepted.extend(zip(range(draft.start, end), repeat(draft.source)))
        self.rejected[draft.source] += draft.planned - (end - draft.start)
        return end - draft.start

    def begin_draft(self, tokens: list[int], cost: float, source: int) -> None:
        """Draft `tokens` behind the known tokens, to be computed in the next step."""
        end = self.length + len(tokens)
        self.reserve_tokens(len(tokens))
        self.tokens[self.length : end] = tokens
        self.draft = Draft(tokens, self.length, self.length, len(tokens), cost, source)
        self.stands_by = True

    def reserve_tokens(self, count: int) -> None:
        """Reserve space for `count` tokens behind the known ones, in amortised O(count)."""
        if self.length + count > len(self.tokens):
            # Plans in flight keep views of the old buffer.
            more = np.empty(max(self.length, count), np.int32)
            self.tokens = np.concatenate((self.tokens, more))

    def reserve_table(self, count: int) -> None:
        """Make `table` at least `count` long; `count` exceeds the present length."""
        grown = np.zeros(max(count, 2 * len(self.table)), np.int32)
        grown[: self.table_len] = self.table[: self.table_len]
        self.table = grown

    def add_block(self, block: int) -> None:
        """Append one block to the table."""
        end = self.table_len
        if end == len(self.table):
            self.reserve_table(end + 1)
        self.table[end] = block
        self.table_len = end + 1

    def shorten(self, length: int) -> None:
        """Drop the tokens behind `length`, neither emitted nor computed."""
        assert self.emitted <= length <= self.length and self.computed <= length
        self.tokens = self.tokens.copy()  # plans in flight keep views of the old buffer
        self.outputs -= self.length - length
        self.length = length
        self.last = int(self.tokens[length - 1])
        self.forced = [at for at in self.forced if at < length]
        self.score_stop = min(self.score_stop, length)
        self.score_next = min(self.score_next, self.score_stop)
        keep = min(self.score_next, length) if self.score_next < self.score_stop else length
        self._cut_scores(keep - self.emitted)

    def _cut_scores(self, count: int) -> None:
        first_scores: list[TokenScores] = []
        for part in self.output_scores:
            if count <= 0:
                break
            first_scores.append(part.first(count))
            count -= len(part.logprobs)
        self.output_scores = first_scores

    def want_scores(self, start: int) -> None:
        """Request scores of the tokens from `start` to the end."""
        if self.score_next >= self.score_stop:
            self.score_next = start
        self.score_stop = self.length

    def take_scores(self, scores: TokenScores, stop: int) -> None:
        """Add the scores of the tokens up to `stop`, behind the tokens scored before."""
        start = stop - len(scores.logprobs)
        prompt = max(self.prompt_len - start, 0)
        if prompt:
            self.prompt_scores.append(scores.first(prompt))
        if stop > self.prompt_len:
            self.output_scores.append(scores.behind(prompt))

    def target(self) -> int:
        """Count the tokens to compute before the next sample, or before the request ends.

        The last token of a complete output needs no KV, nor does the last token of a prompt that is
        scored and not pinned.
        """
        if self.ending is None:
            return self.length
        scored = self.score_from < self.prompt_len and not self.request.handling.cache.pin
        return self.length - 1 if scored or self.length > self.prompt_len else self.length

    def match_limit(self) -> int:
        """Return how many tokens may come from the cache: tokens without a requested score or
        state."""
        limit = self.length - 1 if self.ending is None else self.target()
        if self.score_next < self.score_stop:
            limit = min(limit, self.score_next - 1)
        if self.pool is not None:
            limit = min(limit, self.pool.next)
        return limit

    def count_prompt(self, *, cached: bool) -> int:
        """Count prompt tokens up to `computed` that were not counted yet; return their count."""
        fresh = min(self.computed, self.prompt_len) - self.covered
        if fresh <= 0:
            return 0
        if cached and not self.covered:
            self.first_cached = fresh
        self.covered += fresh
        if cached:
            self.cached_tokens += fresh
        return fresh

    def __repr__(self) -> str:
        return f"<Sequence {self.rid} computed={self.computed}/{self.length}>"


# Limits -------------------------------------------------------------------------------------------


class Limits(msgspec.Struct, frozen=True):
    """Limits of the requests that the engine can serve.

    `capacity`: tokens that the KV pool holds. `vocab_size`: 0 allows any token id. `labels`,
    `adapters`: see `Ready`. `pinned`: tokens of the pool that are unavailable now. No error names
    this number, since pins may belong to other clients.
    """

    context_length: int
    capacity: int
    vocab_size: int
    labels: int | None = None
    adapters: tuple[str, ...] = ()
    pinned: int = 0

    @property
    def max_length(self) -> int:
        """Return the maximum length of a sequence; the last token needs no KV, as no token attends
        to it."""
        return min(self.context_length, self.capacity - self.pinned + 1)

    def beside(self, pinned: int) -> Limits:
        """Return the limits while `pinned` more tokens of the pool are unavailable."""
        return replace(self, pinned=self.pinned + pinned) if pinned else self

    def longest(self, request: EngineRequest, block_size: int) -> int:
        """Return the maximum length of a checked `request`. A pinned prompt that ends within a
        block needs a copy of this block: the pin holds the tree's block."""
        prompt = len(request.token_ids)
        if not request.handling.cache.pin or not prompt % block_size:
            return self.max_length
        return max(self.beside(block_size).max_length, prompt + len(request.output_ids) + 1)

    def check(self, request: EngineRequest, *, constrained: bool) -> None:
        """Check a request against the limits.

        Raises InvalidRequest, or ContextLengthExceeded if not even one token fits.
        """
        params = request.params
        if not len(request.token_ids):
            raise InvalidRequest("the prompt is empty")
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens must be a number here")
        # The model has to support the request's kind of output.
        if request.pooling == "none":
            if self.labels is not None:
                head = f"its head scores {self.labels} labels" if self.labels else "it has no head"
                raise InvalidRequest(f"this model does not generate text: {head}")
        elif params.max_tokens or params.prompt_logprobs_from is not None:
            raise InvalidRequest("a request for a vector neither samples nor scores tokens")
        elif request.pooling == "labels" and not self.labels:
            raise InvalidRequest("this model has no head that scores labels")
        for name, ids in (
            ("prompt", request.token_ids),
            ("output", request.output_ids),
            ("prediction", request.prediction),
        ):
            # A single bad id would make the executor fail the whole step.
            bad = len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size)
            if bad and self.vocab_size:
                raise InvalidRequest(f"the {name} has ids outside 0..{self.vocab_size - 1}")
        if constrained and not self.vocab_size:
            raise InvalidRequest("constrained requests need a scheduler that knows vocab_size")
        outputs = len(request.output_ids)
        length = len(request.token_ids) + outputs
        window = self.context_length - int(outputs < params.max_tokens)
        longest = min(window, self.capacity)
        if length > longest:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens; at most {longest} fit into the context window "
                f"and the KV cache ({self.capacity} tokens)"
            )
        if length > self.capacity - self.pinned:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens, for which the KV cache ({self.capacity} tokens) "
                "has no room beside the pinned prompts"
            )

    def adapter(self, request: EngineRequest) -> int:
        """Return the index of the request's adapter. Raises InvalidRequest."""
        if request.adapter not in self.adapters:
            known = f"there are {', '.join(self.adapters)}" if self.adapters else "there are none"
            raise InvalidRequest(f"the adapter {request.adapter!r} is not loaded: {known}")
        return self.adapters.index(request.adapter)


# In-flight step -----------------------------------------------------------------------------------


Work = tuple[float, ...]
"""Factors of the coefficients of `StepCost` in a step; the first is 1 for the step itself."""


@dataclass(slots=True)
class InFlightStep:
    """Sequences that a planned step serves, between plan and commit.

    `sampled`: sequences of the plan's samples, with their epochs. `scored`: sequences of the prompt
    scores, with the first token and the end. `pooled`: sequences of the pooled rows, with the first
    token. `complete`: sequences that end with the step without a sample.
    """

    plan: StepPlan
    rows: list[RequestState]
    sampled: list[tuple[RequestState, int]]
    scored: list[tuple[RequestState, int, int]]
    complete: list[RequestState]
    pooled: list[tuple[RequestState, int]] = field(default_factory=list)
    begun: float = 0.0
    """Start time by the scheduler's clock."""
    work: Work = ()
    """The step's work, for the forecast of its cost and for learning the cost."""

    def wanted(self) -> list[tuple[int, RequestState]]:
        """Return the samples that count, as (index, sequence)."""
        return [
            (at, sequence)
            for at, (sequence, epoch) in enumerate(self.sampled)
            if sequence.epoch == epoch and not sequence.finished
        ]

    def awaits(self, sequence: RequestState) -> bool:
        """Return whether the step returns something other than a sample for `sequence`."""
        sequences = [s for s, _, _ in self.scored] + [s for s, _ in self.pooled]
        return sequence in self.complete or any(s is sequence for s in sequences)

    def drop(self) -> None:
        """Drop the step, which has to be computed again. Waits for masks being filled, since their
        matchers continue."""
        if self.plan.wait_for_masks is not None:
            self.plan.wait_for_masks()
        for _, sequence in self.wanted():
            sequence.drop_pending()
        for sequence, start, _ in self.scored:
            sequence.score_next = min(sequence.score_next, start)
        for sequence, start in self.pooled:
            assert sequence.pool is not None
            sequence.pool.next = min(sequence.pool.next, start)


# Counters -----------------------------------------------------------------------------------------


@dataclass
class Counters:
    """Counters of the scheduler, explained in docs/operations.md, "Counters". `drafted`,
    `accepted`: draft tokens and accepted draft tokens of each of `DRAFT_SOURCES`."""

    steps: int = 0
    requests_added: int = 0
    requests_refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    dropped_samples: int = 0
    copies: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * len(DRAFT_SOURCES))
    accepted: list[int] = field(default_factory=lambda: [0] * len(DRAFT_SOURCES))
    by_finish: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )

    def values(self) -> dict[str, int | float]:
        """Return counters by name, `by_finish` as `requests_stop` and so on."""
        values = dict(vars(self))
        del values["by_finish"], values["drafted"], values["accepted"]
        for name, counts in (("drafted", self.drafted), ("accepted", self.accepted)):
            values[f"{name}_tokens"] = sum(counts)
            values |= {
                f"{name}_{by}_tokens": n for by, n in zip(DRAFT_SOURCES, counts, strict=True)
            }
        return values | {f"requests_{finish}": count for finish, count in self.by_finish.items()}
