"""Interface of a set of kernels, and the inputs of attention's planning.

Each operation is one function. `kernels/reference/` is the specification (each file states its
formula) and the CPU path. An accelerated set replaces functions one by one
(`msgspec.structs.replace(REFERENCE, rope=...)`) and is tested against the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rootlace.kernels.weights import Weight


class AttentionBatch(msgspec.Struct, frozen=True):
    """Rows of a step as numbers on the host, the same for every layer.

    Row r owns the flat tokens `row_start[r] : row_start[r + 1]`, the last of its `context_len[r]`
    tokens. Its position p is in slot `block_tables[r, p // block_size] * block_size + p %
    block_size`.
    """

    row_start: np.ndarray  # [R+1] int
    context_len: np.ndarray  # [R] int
    block_tables: np.ndarray  # [R, W] int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class HostPlan(Protocol):
    """Host work of one step's attention, the same for every layer with its window.

    The kernels read `arrays` (int32). The executor sends the arrays to the device with all other
    arrays of the step, in one transfer. `bind` makes the plan for `paged_attention` from the sent
    arrays. A set that uploads by itself has no arrays.
    """

    @property
    def arrays(self) -> list[np.ndarray]:
        return []

    def bind(self, tensors: list[Tensor]) -> Any:
        """Return the plan for `paged_attention`; `tensors` are the `arrays` on the device."""
        return self


class PlanAttention(Protocol):
    """Plan the attention of a step.

    `window`: a token sees itself and the `window - 1` tokens before it; None: all tokens before it.

    With `rows`, every row must be a decode row (one new token). Plans of one `rows` are a family
    with equal launches. `arrays` differ in contents and in the length of the last array only, never
    in meaning, so a captured graph can be replayed on them. Rows from `len(context_len)` up to
    `rows` are empty.
    """

    def __call__(
        self, batch: AttentionBatch, window: int | None, rows: int | None = None
    ) -> HostPlan: ...


class KVScales(msgspec.Struct, frozen=True):
    """Factors of one layer's stored keys and values: float32 [Nk] each."""

    k: Tensor
    v: Tensor


ALIGNMENT = 16


def slot_bytes(bits: int, heads: int, dim: int) -> int:
    """Return the bytes of one token's keys, or values, in a layer of a cache of integers."""
    words = -(-heads * dim * bits // 32) + heads * (1 if bits == 8 else -(-dim // 32))
    return -(-4 * words // ALIGNMENT) * ALIGNMENT


class KVCodes(msgspec.Struct, frozen=True):
    """Format of integer keys and values: `bits` (8 or 4), for `heads` KV heads, with scales in the
    cache. The cache is uint8 [B, S, 1, W], a row of W bytes per slot (`reference/kv_cache.py`)."""

    bits: int
    heads: int


KVScaling = KVScales | KVCodes
"""Conversion of stored numbers to keys and values, if they differ."""


class PagedAttention(Protocol):
    """Compute causal attention of the step's tokens over their rows' cached keys and values.

    q [T, Nq, D]; k_cache, v_cache [B, S, Nk, D] of one layer hold this step's tokens already. The
    caches have q's dtype, float8_e4m3fn with `KVScales`, or the format of `KVCodes`, read in q's
    dtype. Scores are `scale` (default 1/sqrt(D)) times q . k, then, with `soft_cap` c > 0, c *
    tanh(score / c). Returns the output [T, Nq, D]. With `want_lse`, also the natural log-sum-exp of
    the scores, float32 [T, Nq] (to merge attention over parts of a context).
    """

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Any,
        *,
        scale: float | None = None,
        soft_cap: float = 0.0,
        scales: KVScaling | None = None,
        want_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...


class Linear(Protocol):
    """Multiply x [T, inputs] by a weight -> [T, outputs] of x's dtype. `KernelSet.weights` names
    the kinds of weights. `out`, if given, is contiguous and receives the result."""

    def __call__(self, x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor: ...


class RopeAndWrite(Protocol):
    """Norm and rotate queries and keys, write keys and values to the cache, in one pass.

    qkv [T, Nq + 2 Nk, D]; cos, sin [T, D/2]; norm weights [D], if given, are applied per head
    first. k_cache, v_cache [B, S, Nk, D] of one layer have qkv's dtype, float8_e4m3fn with
    `KVScales` (stored: value / scale, rounded to nearest, saturated at 448), or the format of
    `KVCodes`. Write i goes to slot `slots[i]` (int64 [M]) and holds token `tokens[i]`; None: token
    i (M = T). With `tokens`, its first T entries are 0..T-1. Returns the rotated queries [T, Nq,
    D]. With integer keys, the queries are mixed as the keys are (`reference/kv_cache.py`).
    """

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        tokens: Tensor | None = None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        scales: KVScaling | None = None,
    ) -> Tensor: ...


class WriteKV(Protocol):
    """Write keys and values k, v [T, Nk, D], unconverted, to one layer's caches [B, S, Nk, D].
    `slots` and `tokens` are those of `RopeAndWrite`."""

    def __call__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        tokens: Tensor | None = None,
    ) -> None: ...


Array: TypeAlias = Any
"""Tensor, or NumPy's array for the kernels of `HostSampling`."""


class LogitEdits(msgspec.Struct, frozen=True):
    """Edits of logits [R, V] before sampling, in this order: bias, bans, mask, penalties.

    `reference/sampling.py` has the formulas. Lists are in compressed rows: row r owns the entries
    `start[r] : start[r + 1]`, sorted by token (all in 0..V-1), without duplicates. None means no
    such edit. `penalties` maps the name of each sampling parameter that depends on earlier tokens
    to its values; with `seen_*`, all are given.
    """

    bias_start: Array | None = None  # [R+1] int32
    bias_token: Array | None = None  # [B] int32
    bias: Array | None = None  # [B] float32, -inf: banned
    mask_table: Array | None = None  # [N, W] int32
    mask_row: Array | None = None  # [R] int32, -1: everything is allowed
    seen_start: Array | None = None  # [R+1] int32
    seen_token: Array | None = None  # [P] int32, tokens of the prompt or the output
    seen_count: Array | None = None  # [P] int32, how often in the output
    penalties: Mapping[str, Array] = msgspec.field(default_factory=dict)  # [R] float64 each


class EditLogits(Protocol):
    """Edit logits float32 or bfloat16 [R, V] in one pass -> float32 [R, V], new."""

    def __call__(self, logits: Tensor, edits: LogitEdits) -> Tensor: ...


Choice = Literal["greedy", "random", "cut"]
"""Class of a step's rows: all greedy; none with a cut; any. Selects launches, never results."""


class PickRows(msgspec.Struct, frozen=True):
    """Sampling parameters of R rows.

    `params` maps each parameter that acts on logits, independent of earlier tokens, to its values:
    `temperature` (0: greedy) and the cuts. Numbers of tokens are at least 1; V or more is neutral.
    """

    params: Mapping[str, Array]  # [R] each: float64, or int32 for a number of tokens
    seed: Array  # [R] int64
    position: Array  # [R] int64, not negative
    mask_table: Array | None = None  # [N, W] int32
    mask_row: Array | None = None  # [R] int32, -1: everything is allowed


class PickTokens(Protocol):
    """Pick a token per row of logits float32 or bfloat16 [R, V] -> int32 [R], -1: no distribution.

    `reference/sampling.py` defines the token; forbidden tokens have -inf. At temperature 0 it has
    the largest logit, otherwise it is drawn by (seed, position) from the tokens that the cuts keep.
    `out` int32 [R] receives the tokens and is returned.
    """

    def __call__(
        self, logits: Tensor, rows: PickRows, choice: Choice, out: Tensor | None = None
    ) -> Tensor: ...


class TokenLogprobs(Protocol):
    """Return log_softmax(logits)[r, tokens[r]], float32 [R], in `out` if given; NaN for a token of
    -1. logits float32 or bfloat16 [R, V], tokens int [R]."""

    def __call__(self, logits: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor: ...


Scores: TypeAlias = "tuple[Tensor, Tensor, Tensor]"


class ScoreTokens(Protocol):
    """Score tokens int [N] by logits float32 or bfloat16 [N, V].

    Returns each token's log-probability float32 [N] (NaN for a token of -1), then the `top` best
    tokens of each row int32 [N, min(top, V)], best first, equal ones by id; then their
    log-probabilities float32.
    """

    def __call__(self, logits: Tensor, tokens: Tensor, top: int) -> Scores: ...


class HostSampling(msgspec.Struct, frozen=True):
    """Sampling from logits in main memory: `EditLogits`, `PickTokens` and `ScoreTokens` on NumPy's
    arrays."""

    edit_logits: Callable[..., np.ndarray]
    pick_tokens: Callable[..., np.ndarray]
    score_tokens: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]


class AutomatonTables(msgspec.Struct, frozen=True):
    """Automata on a device, with one numbering of all states and masks.

    State 0 is the dead state, which allows nothing; mask 0 allows nothing. Token t leads from state
    s to state `next_state[next_start[s] + token_class[class_row[s], t]]`.
    """

    mask_of: Tensor  # [S] int32, row of `masks` with the tokens allowed at a state
    class_row: Tensor  # [S] int32
    next_start: Tensor  # [S] int32
    next_state: Tensor  # [N] int32
    token_class: Tensor  # [A, V] int32
    masks: Tensor  # [M, W] int32


class StepAutomata(Protocol):
    """Advance each row's automaton, and return the mask of the next token.

    states int32 [R], in `tables`; -1: the row has no automaton. source int32 [R]: index in `tokens`
    (int32) of the token that the row's automaton takes first; -1: none. rows int32 [R]: masks of
    the rows without an automaton. Returns (states int32 [R], -1 without an automaton; rows of
    `tables.masks` int32 [R]). A token outside the vocabulary leads to state 0.
    """

    def __call__(
        self, states: Tensor, source: Tensor, tokens: Tensor, rows: Tensor, tables: AutomatonTables
    ) -> tuple[Tensor, Tensor]: ...


class KernelSet(msgspec.Struct, frozen=True):
    """The operations of a decoder, for one kind of device. `weights`: the kinds of weights that
    `linear` multiplies by (`Weight.kind`)."""

    name: str
    weights: frozenset[str]
    linear: Linear
    feed_tokens: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Replace tokens: token_ids int64 [T], feeds int64 [T], found int32 [S] -> int64 [T]. Where
    feeds is not negative, the token is `found[feeds[i]]` (0 for -1, which is no token)."""
    embedding: Callable[[Tensor, Tensor], Tensor]
    """Gather rows of weight: weight [V, H], ids int64 [T] -> [T, H]."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """Divide x by its root mean square, times weight: x [..., H], weight [H], eps -> [..., H], one
    dtype."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """Add and norm: x and residual [T, H] (unchanged), weight [H], eps -> (`rms_norm` of the sum,
    the sum)."""
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    """Normalise x: x [..., H], weight, bias [H], eps -> x less its mean over its standard
    deviation, times weight, plus bias [..., H], all of one dtype."""
    rope_and_write: RopeAndWrite
    write_kv: WriteKV
    copy_slots: Callable[[Tensor, Tensor, Tensor], None]
    """Copy slots `source` of cache [L, B, S, Nk, D] to slots `target` (int64 [M] each), in place:
    arguments are cache, source, target. No target may also be a source, or appear twice."""
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    silu_mul: Callable[[Tensor], Tensor]
    """Return act(gate) * up of gate_up [T, 2I] = [gate, up] -> [T, I]."""
    gelu_mul: Callable[[Tensor], Tensor]
    clamped_mul: Callable[[Tensor, float, float], Tensor]
    """Apply gpt-oss's activation to gate_up with alpha and limit -> [T, I]: formula in
    `reference/layers.py`."""
    relu: Callable[[Tensor], Tensor]
    """Return act(x) of x [T, I] -> [T, I]."""
    gelu: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    step_automata: StepAutomata
    edit_logits: EditLogits
    pick_tokens: PickTokens
    token_logprobs: TokenLogprobs
    score_tokens: ScoreTokens
