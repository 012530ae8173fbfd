"""What crosses the border between the scheduler (numbers only) and an executor (tensors).

A step computes T new tokens of R rows, laid out flat (no padding): row r owns the flat tokens
`row_start[r] : row_start[r + 1]`, the last tokens of the first `context_len[r]` tokens of its
sequence. Rows are in depth-first order of the tree, so that rows sharing a node are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from rootlace.wire.protocol import SamplingParams

# Step cost ----------------------------------------------------------------------------------------
#
# What a step costs, in seconds.


class BadCost(ValueError):
    """A cost model that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, linear in what it does:

    `step + prefill * (prompt tokens computed) + decode * (decode rows)
    + context * (tokens of context that decode rows read)
    + pair * (pairs of a prompt token and a token it attends to)`.

    `max_step_tokens` is the budget of the engine it describes. `source` says where the figures come
    from, and whether they were measured.
    """

    step: float
    prefill: float
    decode: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    max_step_tokens: int = 2048
    source: str = ""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise BadCost(f"{part.name} must be a number of seconds, not {value}")
        if self.max_step_tokens < 1 or self.step + self.prefill <= 0:
            raise BadCost("a step must take time and have room for a token")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PRIOR = StepCost(step=2e-3, prefill=1e-4, decode=2e-4, context=1e-9, pair=1e-9)
"""What is believed of an engine while nothing is known."""


def mean_cost(costs: Sequence[StepCost]) -> StepCost:
    """Of engines that are alike, and of which each has measured its own."""
    names = ("step", "prefill", "decode", "context", "pair")
    means = {name: sum(getattr(one, name) for one in costs) / len(costs) for name in names}
    return replace(costs[0], **means)


# Plan ---------------------------------------------------------------------------------------------


MAX_DRAFTED = 128
"""A step has at most one sample per row, and so many more (see `SampleRow.back`)."""


class MaskTable(Protocol):
    """Packed masks that requests share, one row per state; a row never changes once it is filled.

    Where a plan names a row, it is filled. `rows` may be replaced by a larger array that begins
    with the same rows. An executor may keep them on its device, by `key` (unique in the process).
    """

    @property
    def key(self) -> int: ...

    @property
    def rows(self) -> np.ndarray:
        """int32 [capacity, words]."""

    def filled(self, row: int) -> bool:
        """Whether `row` has its mask."""


@dataclass(frozen=True, slots=True)
class MaskRow:
    """`address`, where it is known, says that the row is filled, and where its words (all of the
    vocabulary's) lie in memory for as long as the table is there."""

    table: MaskTable
    row: int
    address: int = field(default=0, compare=False)


@dataclass(frozen=True, eq=False)
class SteppedAutomaton:
    """A whole automaton over tokens, for a device that steps it by itself. `key` is unique in the
    process. Tokens of one class do the same to every state; -1 is forbidden. The end of the
    sequence is no step: after it the state is -1.
    """

    key: int
    token_class: np.ndarray  # int32 [vocab_size]
    next_state: np.ndarray  # int32 [states, classes]
    mask_of: np.ndarray  # int32 [states], the row of `masks` that holds a state's mask
    masks: np.ndarray  # int32 [distinct masks, words]

    @property
    def nbytes(self) -> int:
        parts = (self.token_class, self.next_state, self.mask_of, self.masks)
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True, slots=True)
class AutomatonState:
    automaton: SteppedAutomaton
    state: int


@dataclass(slots=True)
class SampleRow:
    """A row for which a next token is sampled. Never changed once made (it is not frozen because
    that would make it ten times as slow to create, once per row and step).

    `token_ids` are all tokens of the sequence so far (int32, prompt then output), `prompt_len` says
    where the output starts: penalties need both. The token to be sampled is number
    `len(token_ids)` of the sequence; sampling depends on (params.seed, that number) alone.
    `mask` is a packed bitmask over the vocabulary (int32 words, bit i of word w = token 32w+i
    allowed), a row of a table of such masks, or None where everything is allowed; it may be read
    only after `StepPlan.wait_for_masks`. `banned` are token ids that must not be sampled
    now (the stop tokens, before `min_tokens`).

    With `source` >= 0 the row's last token is not known yet: it is what sample number `source` of
    the plan launched before finds, and stands behind `token_ids`. `automaton` is where the
    constraint stands before the unknown token (before the token to be sampled, if all are known);
    the device steps it. A row that needs the host for its mask or its penalties is `late`: what it
    says here is not final (see `StepPlan.late`). `simple`: the best token that the mask allows is
    taken.

    What is sampled follows the row's last token but `back`. So a row whose last tokens are drafted
    has several samples, one behind each of them: `token_ids` then end with as much of the draft.
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

    @property
    def position(self) -> int:
        """The number in its sequence of the token to be sampled."""
        return len(self.token_ids) + (self.source >= 0)


@dataclass(frozen=True)
class PromptScoreRow:
    """Wanted: log-probabilities of tokens of the sequence, given by the flat tokens before them.

    Those are tokens that were not sampled: of the prompt, or forced by a constraint.

    The logits of flat token `flat_start + i` score the sequence's token `targets[i]` (int32 ids).
    """

    row: int
    flat_start: int
    targets: np.ndarray
    top_logprobs: int


@dataclass(frozen=True)
class PooledRow:
    """Wanted: the final hidden states of the `count` flat tokens from `flat_start` on, or, with
    `labels`, the scores that a classifier's head gives each of them."""

    flat_start: int
    count: int
    labels: bool = False


@dataclass(frozen=True)
class StepPlan:
    """One step. Shapes: T new tokens, R rows, C copies, D duplicates; all arrays are NumPy.

    Order of effects: first every copy (its rows were computed in earlier steps); then each layer
    writes the T new keys and values to `slots`, writes those of `duplicate_tokens` a second time to
    `duplicate_slots` (partial blocks shared within this very step), and only then attends.
    A slot is `block * block_size + offset`; a token's slot is the one its row's table says.
    """

    step: int
    token_ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32, position in the sequence
    slots: np.ndarray  # [T] int64, where each token's KV goes
    row_start: np.ndarray  # [R+1] int32
    context_len: np.ndarray  # [R] int32, tokens with KV once the step is done
    # [R, W] int32, row r uses its first ceil(context_len/block_size). Plans of decode steps share
    # it, and what lies behind changes while they are under way.
    block_tables: np.ndarray
    copies: np.ndarray  # [C, 3] int32: source block, destination block, rows from 0
    duplicate_tokens: np.ndarray  # [D] int32, indices into the flat tokens
    duplicate_slots: np.ndarray  # [D] int64
    samples: list[SampleRow] = field(default_factory=list)
    wait_for_masks: Callable[[], None] | None = None
    """Set where masks are being filled on another thread: returns when they are."""
    prompt_scores: list[PromptScoreRow] = field(default_factory=list)
    pooled: list[PooledRow] = field(default_factory=list)
    feeds: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[F, 2] int32: flat token feeds[i, 0] is the result of sample feeds[i, 1] of the plan launched
    before; `token_ids` has no meaning there."""
    adapters: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """[R] int32: the number of each row's adapter, -1: none. Empty: no row has one."""
    common_blocks: np.ndarray | None = None
    """[R-1] int32: how many leading blocks rows r and r + 1 have in common, counting whole blocks
    before the new tokens of both. While it is the same object, rows and what they share are the
    same. None: unknown."""
    rids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """[R] int64: whose rows these are; the same object while rows stay the same."""

    @property
    def late(self) -> bool:
        """Whether rows are to be sampled only once the step before is committed: the executor then
        waits for `Executor.sample`."""
        return any(sample.late for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.context_len)


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of n tokens and, per token, the best k alternatives (ids [n,k], values)."""

    logprobs: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, k] int32
    top_logprobs: np.ndarray  # [n, k] float32

    def first(self, count: int) -> TokenScores:
        """Those of the first `count` tokens (all, if there are fewer)."""
        if count >= len(self.logprobs):
            return self
        return TokenScores(self.logprobs[:count], self.top_ids[:count], self.top_logprobs[:count])

    def behind(self, count: int) -> TokenScores:
        """Those of the tokens behind the first `count`."""
        if not count:
            return self
        return TokenScores(self.logprobs[count:], self.top_ids[count:], self.top_logprobs[count:])


@dataclass(frozen=True)
class StepResult:
    """What the executor found: one token per `plan.samples`, scores where they were asked for.

    `scores[i]` belongs to `samples[i]` (None unless its params ask for logprobs; log-probabilities
    are of the model's own distribution, log-softmax of the raw logits, before penalties,
    temperature and masks, as OpenAI and sglang report them), `prompt_scores[j]` to
    `plan.prompt_scores[j]`, and `pooled[k]`, float32 [tokens, hidden or labels], to
    `plan.pooled[k]`.

    A token id of -1 says that the row has no distribution to sample from: nothing is allowed, or
    the logits are not numbers. That request failed; the others of the step did not.
    """

    token_ids: np.ndarray  # [S] int32
    scores: list[TokenScores | None]
    prompt_scores: list[TokenScores]
    pooled: list[np.ndarray] = field(default_factory=list)


class ExecutorLost(Exception):
    """The executor cannot run any further step in this process: some faults of a GPU end its
    context, and the weights may turn out to be damaged. The process that drives it must end and be
    started again."""


class Executor(Protocol):
    """Runs plans, in the order they are launched. Implementations: the model runner, and the
    simulated executor.

    At most two plans are launched and not collected. A step's effects on the KV memory come after
    those of every plan launched before it, whenever they are collected. A late plan is sampled
    before the next one is launched. When a step fails, the one launched behind it is still sampled
    and collected, and its result dropped.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def run(self, plan: StepPlan) -> StepResult:
        """A step from beginning to end. Raises ValueError for a late plan."""

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns while the step runs; only then does planning ahead pay."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step. With `plan.late`, nothing is sampled before `sample` is called."""

    def sample(self, launched: Launched, samples: list[SampleRow]) -> None:
        """Let a late plan's step end: its `samples`, none of them late any more."""

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's result. Raises what running it raised, or `ExecutorLost`."""


class Launched(Protocol):
    """A step under way, as its executor knows it."""

    @property
    def plan(self) -> StepPlan: ...


def run(executor: Executor, plan: StepPlan) -> StepResult:
    """One step from beginning to end, with none under way."""
    if plan.late:
        raise ValueError("a late plan follows another")
    return executor.collect(executor.launch(plan))
