"""A request under way: its tokens, its blocks, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.cache import Node
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineRequest, Pooling, kv_namespace
from rootlace.runtime.contracts.plan import StepPlan, TokenScores
from rootlace.runtime.scheduler.prediction import PredictedText, Prediction
from rootlace.wire.protocol import CacheReport
from rootlace.wire.sampling import PARAMETERS

# Pooling ------------------------------------------------------------------------------------------
#
# What a request with a pooling asks for, gathered chunk by chunk.


class Pool:
    """Hidden states of one request on their way to a vector.

    `next` is the first token whose state is still to be computed; a cached prefix may not reach
    beyond it. Of the mean that is every token, of the other poolings the last one.
    """

    __slots__ = ("_sum", "count", "labels", "length", "next")

    def __init__(self, pooling: Pooling, length: int) -> None:
        self.length = length
        self.labels = pooling == "labels"
        self.next = 0 if pooling == "mean" else length - 1
        self.count = 0
        self._sum: np.ndarray | None = None

    def plan(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the tokens `start : stop`, computed now, are wanted: first and end."""
        first = max(self.next, start)
        self.next = max(self.next, stop)
        return first, stop

    def take(self, states: np.ndarray) -> None:
        """float32 [tokens, size]: those that follow the ones before.

        They are added one by one, so that the sum does not depend on where chunks were cut.
        """
        if self._sum is None:
            self._sum = np.zeros(states.shape[1])
        for state in states:
            self._sum += state
        self.count += len(states)

    def vector(self) -> np.ndarray:
        """float32 [size]."""
        assert self._sum is not None and self.next == self.length
        return (self._sum / self.count).astype(np.float32)


# Sequence -----------------------------------------------------------------------------------------


_PENALTIES = [each for each in PARAMETERS.values() if each.history]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ends; the fields are those of `Update`."""

    finish: str
    matched: int | None = None
    code: str = ""
    error: str = ""


@dataclass(slots=True)
class Draft:
    """Tokens that a step under way computes behind the first `right` of a sequence, in the hope
    that they are sampled. `right` grows with those that are. Of `planned` tokens those at the end
    are left out behind which nothing could be sampled: their masks took too long. `cost`: in
    tokens, beside one that is right."""

    tokens: list[int]
    start: int
    right: int
    planned: int
    cost: float

    def agreed(self, tokens: np.ndarray, length: int) -> int:
        """How many of the sequence's `length` tokens are computed as they are."""
        end = min(length, self.start + len(self.tokens))
        while self.right < end and tokens[self.right] == self.tokens[self.right - self.start]:
            self.right += 1
        return self.right


class RequestState:
    """State of one request, from `add` to its last update.

    `tokens[:length]` are prompt and output; the KV of the first `computed` tokens is in memory
    once the steps under way are done. `table[:table_len]` are its blocks. The handle `node` ends at
    `tree_len <= computed`: the table up to `tree_len // block_size` is that of the tree path, and
    the sequence itself refers to the blocks behind. A *detached* sequence has no handle and refers
    to all its blocks.

    `pending` tokens behind `length` are being sampled by steps under way, the last of them as
    sample `sampled_at` of the step planned last. With one of them a step may compute the next token
    already: then `computed` is beyond `length`. A sample counts if `epoch` is still what it was
    when it was planned. With a `draft` all of the step's samples are pending, and its tokens, which
    lie behind `length` in `tokens`, are computed.
    """

    __slots__ = (
        "accepted",
        "accusations",
        "adapter",
        "announced",
        "arrived",
        "cached_tokens",
        "computed",
        "covered",
        "decoding",
        "detached",
        "draft",
        "emitted",
        "emitted_at",
        "ending",
        "epoch",
        "fault",
        "finished",
        "forced",
        "found",
        "full",
        "held",
        "jumped",
        "jumps",
        "last",
        "length",
        "matcher",
        "namespace",
        "node",
        "number",
        "order",
        "output_scores",
        "outputs",
        "params",
        "penalised",
        "pending",
        "pin",
        "pinned",
        "plain",
        "pool",
        "predicted",
        "prediction",
        "program",
        "prompt_len",
        "prompt_scores",
        "queued",
        "rejected",
        "report",
        "request",
        "restored",
        "rid",
        "sampled_at",
        "score_from",
        "score_next",
        "score_stop",
        "simple",
        "sought",
        "stands_by",
        "stepped",
        "stops",
        "suspected_until",
        "table",
        "table_len",
        "tokens",
        "tree_len",
    )

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
        """`matcher` has taken in the request's `output_ids`. `jumps`: what it forces is appended
        without being sampled. A sequence of `max_length` tokens ends."""
        params = request.params
        outputs = len(request.output_ids)
        self.request = request
        self.params = params
        self.rid = request.rid
        self.adapter = adapter
        """Its number; -1: none."""
        self.namespace = kv_namespace(request.namespace, request.adapter)
        self.program = 0
        """The cache's id of the request's program."""
        self.number = number
        """Counts requests in order of arrival."""
        self.arrived = arrived
        self.order = -1
        """Counts sequences in order of first admission; kept through retraction."""
        self.queued: float | None = None

        self.prompt_len = len(request.token_ids)
        self.outputs = outputs
        self.length = self.prompt_len + outputs
        self.full = min(self.prompt_len + self.max_tokens, max_length)
        """At this length it ends, whatever the tokens are."""
        self.tokens = np.empty(self.length + 16, np.int32)
        self.tokens[: self.prompt_len] = request.token_ids
        self.tokens[self.prompt_len : self.length] = request.output_ids
        self.last = int(self.tokens[self.length - 1])
        """The last token."""
        self.stops = frozenset(params.stop_token_ids)
        self.matcher = matcher
        self.jumps = matcher is not None and jumps
        self.held = matcher is not None and matcher.can_retreat()
        """Whether the constraint may take outputs back; they are emitted at the end then."""
        self.ending: Ending | None = None
        """Set when nothing more is sampled, though something is still to be computed."""
        if outputs >= self.max_tokens:
            self.ending = Ending("length")
        elif matcher is not None and matcher.is_finished():
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
        """Prompt tokens counted so far, as cached or as computed: each counts once."""
        self.cached_tokens = 0
        self.restored = 0
        """Tokens that were read back for it from below the pool."""
        self.found = 0
        """Prompt tokens that were cached when it was first admitted."""
        self.report: CacheReport | None = None
        """Why so much was cached when it was admitted, if the request asks for it."""
        self.announced = False
        self.lose_pin()
        self.finished = False
        self.accusations = 0
        """How often it was in a step of several that failed, and nobody was found guilty."""
        self.suspected_until = 0
        """Until so many tokens are computed, it is computed alone (`Suspects`)."""
        self.pending = 0
        self.sampled_at = -1
        self.epoch = 0
        self.draft: Draft | None = None
        self.predicted: PredictedText | None = None
        """What its client predicts, if drafts may be made of it."""
        self.prediction: Prediction | None = None
        """Where it stands in that, once it was admitted."""
        self.stands_by = False
        """Whether it is in no step that is planned while one of its tokens is pending."""
        self.accepted: list[int] = []
        """Where drafted tokens stand that were sampled and not emitted yet; ascending."""
        self.rejected = 0
        """Drafted tokens that were not sampled, since the last update."""
        self.fault: BaseException | None = None
        """What its constraint failed with, so that it ends with its next token."""
        self.stepped = False
        """Whether the row planned last carries an automaton's state, which the device steps."""
        self.penalised = any(getattr(params, each.name) != each.default for each in _PENALTIES)
        """Whether sampling depends on all tokens before."""
        self.simple = not (
            params.temperature > 0 or params.logit_bias or params.min_tokens or self.penalised
        )
        """Whether sampling means taking the best allowed token."""
        self.plain = not (params.min_tokens or self.held)
        """Whether no stop is banned and nothing is taken back: see `try_take_fast`."""
        self.table = np.empty(0, np.int32)
        self.forget_kv()

    def lose_pin(self) -> None:
        """Its prompt is not pinned, or not any more."""
        self.pinned = not self.request.handling.cache.pin
        """Whether its prompt is pinned, or need not be."""
        self.pin = ""
        """The id of its pin, once there is one."""

    def forget_kv(self) -> None:
        """Start without KV; tokens, scores and counts stay."""
        self.node: Node | None = None
        self.tree_len = 0
        self.computed = 0
        self.table_len = 0
        self.detached = False
        self.sought = False
        """Whether it was looked for below the pool what is missing of it."""
        self.decoding = False
        self.jumped = False
        """Whether it computes a few forced tokens that stay out of the tree until it ends, as
        decoded tokens do."""

    @property
    def max_tokens(self) -> int:
        limit = self.request.params.max_tokens
        assert limit is not None
        return limit

    def drop_pending(self) -> None:
        """Samples under way do not count: something else follows."""
        self.epoch += 1
        self.pending = 0
        self.close_draft()

    def fail(self, fault: BaseException) -> None:
        """Nobody knows any more where its constraint stands: it ends with its next token."""
        self.fault, self.matcher, self.plain = fault, None, False

    def admitted(self) -> None:
        """It is to run for the first time. What waits in the queue follows no prediction."""
        if self.predicted is not None:
            self.prediction = Prediction(self.predicted, self.prompt_len)
            self.prediction.follow(self.tokens, self.length)

    def close_draft(self) -> int:
        """There is no draft any more; returns how many of its tokens came."""
        draft, self.draft = self.draft, None
        if draft is None:
            return 0
        end = draft.agreed(self.tokens, self.length)
        self.accepted.extend(range(draft.start, end))
        self.rejected += draft.planned - (end - draft.start)
        return end - draft.start

    def begin_draft(self, tokens: list[int], cost: float) -> None:
        """These are computed in the next step, behind the tokens that are known."""
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.empty(end, np.int32)))
        self.tokens[self.length : end] = tokens
        self.draft = Draft(tokens, self.length, self.length, len(tokens), cost)
        self.stands_by = True

    def append(self, token: int) -> None:
        """Append one token, in amortised O(1)."""
        if self.length == len(self.tokens):
            # Plans under way keep views of the old buffer.
            self.tokens = np.concatenate((self.tokens, np.empty(self.length, np.int32)))
        self.tokens[self.length] = token
        self.last = token
        self.length += 1
        self.outputs += 1

    def extend(self, tokens: list[int]) -> None:
        """Append several, at least one."""
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.empty(end, np.int32)))
        self.tokens[self.length : end] = tokens
        self.last = tokens[-1]
        self.outputs += len(tokens)
        self.length = end

    def reserve_table(self, count: int) -> None:
        """Make `table` at least `count` long."""
        if count > len(self.table):
            grown = np.zeros(max(count, 2 * len(self.table), 8), np.int32)
            grown[: self.table_len] = self.table[: self.table_len]
            self.table = grown

    def add_block(self, block: int) -> None:
        """`extend_table` by one."""
        end = self.table_len
        if end == len(self.table):
            self.reserve_table(end + 1)
        self.table[end] = block
        self.table_len = end + 1

    def extend_table(self, blocks: np.ndarray) -> None:
        end = self.table_len + len(blocks)
        self.reserve_table(end)
        self.table[self.table_len : end] = blocks
        self.table_len = end

    def shorten(self, length: int) -> None:
        """Forget the tokens behind `length`, which were neither emitted nor computed."""
        assert self.emitted <= length <= self.length and self.computed <= length
        self.tokens = self.tokens.copy()  # plans under way keep views of the old buffer
        self.outputs -= self.length - length
        self.length = length
        self.last = int(self.tokens[length - 1])
        self.forced = [at for at in self.forced if at < length]
        self.score_stop = min(self.score_stop, length)
        self.score_next = min(self.score_next, self.score_stop)
        keep = min(self.score_next, length) if self.scores_missing else length
        self._cut_scores(keep - self.emitted)

    def _cut_scores(self, count: int) -> None:
        kept: list[TokenScores] = []
        for part in self.output_scores:
            if count <= 0:
                break
            kept.append(part.first(count))
            count -= len(part.logprobs)
        self.output_scores = kept

    def want_scores(self, start: int) -> None:
        """The tokens from `start` to the end are to be scored as they are computed."""
        if not self.scores_missing:
            self.score_next = start
        self.score_stop = self.length

    @property
    def scores_missing(self) -> bool:
        return self.score_next < self.score_stop

    def take_scores(self, scores: TokenScores, stop: int) -> None:
        """The scores of the tokens up to `stop`, which follow those that came before."""
        start = stop - len(scores.logprobs)
        prompt = max(self.prompt_len - start, 0)
        if prompt:
            self.prompt_scores.append(scores.first(prompt))
        if stop > self.prompt_len:
            self.output_scores.append(scores.behind(prompt))

    def target(self) -> int:
        """How many tokens must be computed before the next sample, or before the request ends.

        Nobody needs the KV of a complete output's last token.
        """
        if self.ending is None or self.length == self.prompt_len:
            return self.length
        return self.length - 1

    def match_limit(self) -> int:
        """How many tokens may come from the cache: those of which nothing else is wanted."""
        limit = self.length - 1 if self.ending is None else self.target()
        if self.scores_missing:
            limit = min(limit, self.score_next - 1)
        if self.pool is not None:
            limit = min(limit, self.pool.next)
        return limit

    def count_prompt(self, *, cached: bool) -> int:
        """Count the prompt tokens up to `computed` that were not counted yet; returns how many."""
        fresh = min(self.computed, self.prompt_len) - self.covered
        if fresh <= 0:
            return 0
        if cached and not self.covered:
            self.found = fresh
        self.covered += fresh
        if cached:
            self.cached_tokens += fresh
        return fresh

    def __repr__(self) -> str:
        return f"<Sequence {self.rid} computed={self.computed}/{self.length}>"


# Flight -------------------------------------------------------------------------------------------
#
# A step between its plan and its commit.


@dataclass(slots=True)
class InFlightStep:
    """Whom a plan under way is for.

    `sampled` are the sequences of the plan's samples, with the epochs for which these count;
    `scored` those of its prompt scores, with the first token and the end of what is scored;
    `pooled` those of its pooled rows, with the first token; `complete` those that end with this
    step without a sample.
    """

    plan: StepPlan
    rows: list[RequestState]
    sampled: list[tuple[RequestState, int]]
    scored: list[tuple[RequestState, int, int]]
    complete: list[RequestState]
    pooled: list[tuple[RequestState, int]] = field(default_factory=list)
    begun: float = 0.0
    """By the scheduler's clock."""

    def wanted(self) -> list[tuple[int, RequestState]]:
        """The samples that count, as (index, sequence)."""
        return [
            (at, sequence)
            for at, (sequence, epoch) in enumerate(self.sampled)
            if sequence.epoch == epoch and not sequence.finished
        ]

    def awaits(self, sequence: RequestState) -> bool:
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


# Counters -----------------------------------------------------------------------------------------
#
# What the scheduler counts; docs/operations.md, "Counters", says what each means.


@dataclass
class Counters:
    steps: int = 0
    requests_added: int = 0
    requests_refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    dropped_samples: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    copies: int = 0
    by_finish: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )

    def values(self) -> dict[str, int | float]:
        """By name, `by_finish` as `requests_stop` and so on."""
        values: dict[str, int | float] = dict(vars(self))
        del values["by_finish"]
        return values | {f"requests_{finish}": count for finish, count in self.by_finish.items()}
