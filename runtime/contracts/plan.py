"""The step plan and its result, between the scheduler (numbers only) and an executor (tensors).

 row_start      0        3    4                8          R = 3 rows, T = 8 new tokens, no padding
 token_ids      t t t  | t  | t t t t |
 context_len    3        90   64                        row 1 decodes: 1 new of 90 tokens

Row r owns the flat tokens `row_start[r] : row_start[r + 1]`, the last tokens of the first
`context_len[r]` tokens of its sequence. Rows are in depth-first order of the tree, so that rows
sharing a node are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.wire.protocol import SamplingParams

# Step cost ----------------------------------------------------------------------------------------


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of a step, linear in the work:

    `step + prefill * (prompt tokens computed) + decode * (decode rows)
    + context * (tokens of context that decode rows read)
    + pair * (pairs of a prompt token and a token it attends to)
    + score * (tokens whose log-probabilities are computed)`.

    `max_step_tokens` is the budget of the described engine. `source`: origin of the figures, and
    whether measured.
    """

    step: Seconds
    prefill: Seconds
    decode: Seconds = 0.0
    context: Seconds = 0.0
    pair: Seconds = 0.0
    max_step_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    source: str = ""
    score: Seconds = 0.0


PRIOR = StepCost(step=2e-3, prefill=4e-4, decode=4e-4, context=1e-9, pair=1e-9, score=2e-4)
"""Cost of an engine before any measurement, in the proportions of a CPU, where the cost bounds
steps: one read of the weights takes as long as to compute 5 tokens."""


def mean_cost(costs: Sequence[StepCost]) -> StepCost:
    """Mean of the measured costs of equal engines."""
    names = ("step", "prefill", "decode", "context", "pair", "score")
    means = {name: sum(getattr(one, name) for one in costs) / len(costs) for name in names}
    return replace(costs[0], **means)


# Plan ---------------------------------------------------------------------------------------------


MAX_DRAFTED = 128
"""Samples of a step beyond one per row, at most (see `SampleRow.back`)."""


class MaskTable(Protocol):
    """Packed masks that requests share, one row per state; a filled row never changes.

    Every row in a plan is filled. `rows` may be replaced by a larger array with the same leading
    rows. An executor may cache rows on its device, by `key` (unique in the process).
    """

    @property
    def key(self) -> int: ...

    @property
    def rows(self) -> np.ndarray:
        """int32 [capacity, words]."""

    def filled(self, row: int) -> bool:
        """Return whether `row` has its mask."""


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A row of a mask table.

    A known `address` means that the row is filled, and is the memory of its words (the
    vocabulary's) as long as the table exists.
    """

    table: MaskTable
    row: int
    address: int = field(default=0, compare=False)


class SteppedAutomaton(msgspec.Struct, frozen=True, eq=False):
    """A complete automaton over tokens, which a device advances by itself.

    `key` is unique in the process. Tokens of one class do the same to every state; -1 is forbidden.
    The end of the sequence is no step: after it the state is -1.
    """

    key: int
    token_class: np.ndarray  # int32 [vocab_size]
    next_state: np.ndarray  # int32 [states, classes]
    mask_of: np.ndarray  # int32 [states], row of a state's mask in `masks`
    masks: np.ndarray  # int32 [distinct masks, words]

    @property
    def nbytes(self) -> int:
        parts = (self.token_class, self.next_state, self.mask_of, self.masks)
        return sum(part.nbytes for part in parts)


class AutomatonState(msgspec.Struct, frozen=True):
    automaton: SteppedAutomaton
    state: int


class SampleRow(msgspec.Struct, frozen=True):
    """A row for which a next token is sampled.

    `token_ids` are all tokens of the sequence so far (int32, prompt then output); the output starts
    at `prompt_len`: penalties need both. The sampled token is number `len(token_ids)` of the
    sequence. Sampling depends on (params.seed, that number) alone. `mask` is a packed bitmask over
    the vocabulary (int32 words, bit i of word w = token 32w+i allowed), a row of a mask table, or
    None where every token is allowed. `mask` is readable only after `StepPlan.wait_for_masks`.
    `banned`: token ids that must not be sampled now (the stop tokens, before `min_tokens`).

    With `source` >= 0 the row's last token is unknown: the result of sample number `source` of the
    plan launched before, and its place is behind `token_ids`. `automaton` is the constraint's state
    before the unknown token (before the sampled token, if all are known); the device advances the
    state. A row that needs the host for mask or penalties is `late`, and its fields are not final
    (see `StepPlan.late`). `simple`: the best allowed token is taken.

    A sample follows the row's last token but `back`. So a row with drafted tokens has several
    samples, one behind each: `token_ids` then end with as much of the draft.
    """

    row: int
    params: SamplingParams
    token_ids: np.ndarray
    prompt_len: int
    mask: np.ndarray | MaskRow | None = None
    banned: tuple[int, ...] = ()
    source: int = -1
    automaton: AutomatonState | None = None
    late: bool = False
    simple: bool = False
    back: int = 0


class PromptScoreRow(msgspec.Struct, frozen=True):
    """A request for log-probabilities of tokens, given by the flat tokens before each.

    These tokens were not sampled: they are of the prompt, or forced by a constraint.

    The logits of flat token `flat_start + i` score the sequence's token `targets[i]` (int32 ids).
    """

    row: int
    flat_start: int
    targets: np.ndarray
    top_logprobs: int


class PooledRow(msgspec.Struct, frozen=True):
    """A request for the final hidden states of the `count` flat tokens from `flat_start` on.

    With `labels`: for the scores that a classifier's head gives each token.
    """

    flat_start: int
    count: int
    labels: bool = False


class StepPlan(msgspec.Struct):
    """One step: T new tokens, R rows, C copies, D duplicates; all arrays are NumPy. Never changed
    once the scheduler hands it out.

    Order of effects: first every copy (its rows were computed in earlier steps); then each layer
    writes the T new keys and values to `slots`. Those of `duplicate_tokens` are written a second
    time to `duplicate_slots` (partial blocks shared within this very step). Only then the layer
    attends. A slot is `block * block_size + offset`; a token's slot follows from its row's table.
    """

    step: int
    token_ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32, position in the sequence
    slots: np.ndarray  # [T] int64, where each token's KV goes
    row_start: np.ndarray  # [R+1] int32
    context_len: np.ndarray  # [R] int32, tokens with KV once the step is done
    # [R, W] int32, row r uses its first ceil(context_len/block_size). Plans of decode steps share
    # the
    # array, and later entries change while the steps are in flight.
    block_tables: np.ndarray
    copies: np.ndarray = msgspec.field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[C, 3] int32: source block, destination block, rows from 0."""
    duplicate_tokens: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    """[D] int32, indices into the flat tokens."""
    duplicate_slots: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """[D] int64."""
    samples: list[SampleRow] = msgspec.field(default_factory=list)
    """Samples in the order of the rows; samples of drafted rows come last, row by row."""
    wait_for_masks: Callable[[], None] | None = None
    """Waits until masks being filled on another thread are filled; None if none are."""
    prompt_scores: list[PromptScoreRow] = msgspec.field(default_factory=list)
    pooled: list[PooledRow] = msgspec.field(default_factory=list)
    feeds: np.ndarray = msgspec.field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[F, 2] int32: flat token feeds[i, 0] is the result of sample feeds[i, 1] of the plan before.

    `token_ids` has no meaning at these tokens.
    """
    adapters: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    """[R] int32: the number of each row's adapter, -1: none. Empty: no row has one."""
    rids: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """[R] int64: request ids of the rows; the same object while rows stay the same."""
    forecast: float = 0.0
    """Seconds that the step should take; 0 while nothing was measured."""

    @property
    def late(self) -> bool:
        """Whether rows are sampled only after the commit of the step before.

        The executor then waits for `Executor.sample`.
        """
        return any(sample.late for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.context_len)


class TokenScores(msgspec.Struct, frozen=True):
    """Log-probabilities of n tokens and, per token, the best k alternatives (ids [n,k], values)."""

    logprobs: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, k] int32
    top_logprobs: np.ndarray  # [n, k] float32

    def first(self, count: int) -> TokenScores:
        """Scores of the first `count` tokens (all, if there are fewer)."""
        if count >= len(self.logprobs):
            return self
        return TokenScores(self.logprobs[:count], self.top_ids[:count], self.top_logprobs[:count])

    def behind(self, count: int) -> TokenScores:
        """Scores of the tokens behind the first `count`."""
        if not count:
            return self
        return TokenScores(self.logprobs[count:], self.top_ids[count:], self.top_logprobs[count:])


class StepResult(msgspec.Struct, frozen=True):
    """The executor's results: one token per `plan.samples`, and requested scores.

    `scores[i]` belongs to `samples[i]` (None unless its params ask for logprobs). Log-probabilities
    are of the model's own distribution: log-softmax of the raw logits, before penalties,
    temperature and masks, as OpenAI and sglang report. `prompt_scores[j]` belongs to
    `plan.prompt_scores[j]`. `pooled[k]`, float32 [tokens, hidden or labels], belongs to
    `plan.pooled[k]`.

    A token id of -1 means that the row has no distribution to sample from: nothing is allowed, or
    the logits are not numbers. Only that request failed.
    """

    token_ids: np.ndarray  # [S] int32
    scores: list[TokenScores | None]
    prompt_scores: list[TokenScores]
    pooled: list[np.ndarray] = msgspec.field(default_factory=list)


# Draft model --------------------------------------------------------------------------------------


class DraftRow(msgspec.Struct, frozen=True):
    """A sequence that a draft model drafts `count` tokens for.

    `token_ids`: all its tokens (int32, prompt then output, which starts at `prompt_len`). `table`
    (int32): its blocks, with room for the draft. At most `compute` tokens that the draft model
    lacks are computed; where some are left, nothing is drafted. `simple`: the best token is taken.
    """

    token_ids: np.ndarray
    prompt_len: int
    table: np.ndarray
    params: SamplingParams
    simple: bool
    count: int
    compute: int


class ModelDrafts(msgspec.Struct, frozen=True):
    """Drafts of some rows, and their cost: `computed` tokens in the first step, of `seconds`, then
    `steps` further steps of one token for each row, of `step_seconds` in all."""

    drafts: list[list[int]]
    computed: int
    seconds: float
    steps: int
    step_seconds: float


class DraftModel(Protocol):
    """A second model, or a head of the model, whose KV lies in blocks with the executor's numbers.
    The draft model computes while a step is planned. The executor checks drafts, which may be
    anything."""

    @property
    def context_length(self) -> int: ...

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of one token, as measured when the model was loaded."""

    def missing(self, token_ids: np.ndarray, table: np.ndarray) -> int:
        """Return the number of the sequence's last tokens to compute before a draft, at least 1."""

    def draft(self, rows: Sequence[DraftRow]) -> ModelDrafts: ...


# Executor -----------------------------------------------------------------------------------------


class ExecutorLost(Exception):
    """Raised when the executor cannot run any further step in this process.

    Some faults of a GPU end its context, and the weights may turn out to be damaged. The process
    must end and be started again.
    """


class Executor(Protocol):
    """Runs plans, in launch order. Implementations: the model runner, and the simulated executor.

    At most two plans are launched and not collected. A step's effects on the KV memory come after
    those of every plan launched before it, in whatever order the plans are collected. A late plan
    is sampled before the next launch. When a step fails, the step behind it is still sampled and
    collected, and its result dropped.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns while the step runs; only then does planning ahead pay."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step. With `plan.late`, nothing is sampled before `sample` is called."""

    def sample(self, launched: Launched, samples: list[SampleRow]) -> None:
        """Finish a late plan's step with `samples`, which are all final now."""

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's result. Raises the step's exception, or `ExecutorLost`."""


class Launched(Protocol):
    """A step in flight, as its executor knows the step."""

    @property
    def plan(self) -> StepPlan: ...
