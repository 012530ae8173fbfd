"""From logits to tokens: the specification of sampling, which every set of kernels is tested with.

A row's mask, if it has one, makes the logits of forbidden tokens -inf. At temperature 0 the token
is the first of the largest logits x. At temperature T > 0 the distribution is that of the weights
w = exp((x - max x) / T), of which

1. top-k keeps the k largest,
2. top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the shortest prefix of the rest, largest
   first, whose mass among what top-k kept reaches p,
3. min-p (Nguyen et al. 2024, arXiv:2407.01082) keeps w >= min_p.

Equal logits rank by id. The token is the first, in order of ids, at which the mass of what is kept
exceeds u times all of it, where u is the uniform number of the row's (seed, position). Weights and
sums are float64, and every row is computed by itself: who else is in the batch changes nothing.

A row has no distribution, and its token is -1, where its largest logit is not a finite number or
one is NaN.
"""

from __future__ import annotations

import torch

from rootlace.kernels.interface import AutomatonTables, Choice, LogitEdits, PickRows, Scores

# Uniform ------------------------------------------------------------------------------------------
#
# Random numbers that are a function of (seed, position), on any device.
#
# SplitMix64 (Steele, Lea & Flood 2014) used as a counter-based generator:
#
#     u = (mix(mix(seed + g) + (position + 1) * g) >> 11) * 2^-53,   g = 0x9e3779b97f4a7c15
#
# with arithmetic modulo 2^64, mix its finaliser.


GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def uniforms(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return float64 [R] in [0, 1), of 53 random bits each, for seed, position int64 [R]."""
    return random_bits(seed, position).double() * 2.0**-53


def random_bits(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return random int64 [R], from 0 to 2^53 - 1, for seed, position int64 [R]."""
    gamma = _signed(GAMMA)
    stream = _mix(seed + gamma)
    return _shifted(_mix(stream + (position + 1) * gamma), 11)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift bits to the right, as of an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# Ranking ------------------------------------------------------------------------------------------
#
# A total order on logits: the larger value first, the smaller token id among equal values.
#
# Logits computed in bfloat16 are often equal; which tokens are kept, reported or sampled must not
# depend on how a sorting routine happens to order equals.


def best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of each row's `count` best, best first: values float32 [R, V] -> int64 [R,
    count]. NaN ranks before everything. No operation waits for a device."""
    if values.device.type != "cpu":
        return best_ids_by_keys(values, count)
    count = min(count, values.shape[1])
    top, ids = torch.topk(values, count, dim=1)
    # topk chooses among equal values at the end of the `count`. Rows that left equals out are
    # ranked by keys, which are slower to make and to compare.
    split = ((values >= top[:, -1:]).sum(1) > count).nonzero().squeeze(1)
    if len(split):
        ids = ids.index_copy(0, split, best_ids_by_keys(values.index_select(0, split), count))
    keys = _rank_keys(values.gather(1, ids), ids).sort(dim=1, descending=True).values
    return _KEY_IDS - (keys & _KEY_IDS)


def best_ids_by_keys(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return ids as `best_ids` does, for any values."""
    every = torch.arange(values.shape[1], device=values.device)
    keys = torch.topk(_rank_keys(values, every), min(count, values.shape[1]), dim=1).values
    return _KEY_IDS - (keys & _KEY_IDS)


_KEY_IDS = 0xFFFF_FFFF


def _rank_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys, all different within a row, that sort as (value, -id). The upper half is
    the float's bits, made to sort as its value does; the lower the reversed id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, which it equals
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).to(torch.int64)
    return (ordered << 32) + (_KEY_IDS - ids)


# Bitmask ------------------------------------------------------------------------------------------
#
# Token masks of constrained decoding: packed bits, one row of a table per mask.
#
# y[r, i] = x[r, i]  if rows[r] = -1, or bit (i mod 32) of word (i div 32) of mask rows[r] is set
#           -inf     otherwise; also for ids beyond the mask's last word


def apply_masks(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask logits [R, V] in place by table int32 [N, W] and rows int [R]."""
    masked = (rows >= 0).unsqueeze(1)
    words = table[rows.clamp(min=0), : (logits.shape[1] + 31) // 32]
    covered = min(32 * words.shape[1], logits.shape[1])
    forbidden = masked.repeat(1, logits.shape[1])
    forbidden[:, :covered] = _forbidden(torch.where(masked, words, -1))[:, :covered]
    logits.masked_fill_(forbidden, float("-inf"))


def _forbidden(words: torch.Tensor) -> torch.Tensor:
    """Return bool [R, 32 * W] of int32 words [R, W], set where the bit is not."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).eq(0).view(len(words), -1)


# Logits -------------------------------------------------------------------------------------------
#
# Edits of logits before sampling, in this order, on the float32 logits x of a row:
#
# 1. bias: x[t] += bias[t]; a bias of -inf bans t, whatever x[t] is
# 2. mask: x[t] = -inf where the mask does not allow t
# 3. repetition penalty r (Keskar et al. 2019, arXiv:1909.05858), for every token that was seen, in
#    the prompt or the output: x[t] = x[t] / r if x[t] > 0 else x[t] * r
# 4. frequency penalty f and presence penalty p (OpenAI), for tokens of the output:
#    x[t] -= f * count(t) + p, the amount computed in float64 and rounded to float32


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], not changed -> float32 [R, V]."""
    x = logits.to(torch.float32, copy=True)
    flat = x.view(-1)
    if edits.bias_start is not None:
        assert edits.bias_token is not None and edits.bias is not None
        _, index = _places(edits.bias_start, edits.bias_token, x.shape[1])
        banned = edits.bias == float("-inf")
        flat[index] = torch.where(banned, edits.bias, flat[index] + edits.bias)
    if edits.mask_row is not None:
        assert edits.mask_table is not None
        apply_masks(x, edits.mask_table, edits.mask_row)
    if edits.seen_start is not None:
        assert edits.seen_token is not None and edits.seen_count is not None
        owner, index = _places(edits.seen_start, edits.seen_token, x.shape[1])
        penalties = {name: values[owner] for name, values in edits.penalties.items()}
        old, by = flat[index], penalties["repetition_penalty"].float()
        old = torch.where(old > 0, old / by, old * by)
        amount = penalties["frequency_penalty"] * edits.seen_count + penalties["presence_penalty"]
        amount = torch.where(edits.seen_count > 0, amount, 0.0)
        flat[index] = old - amount.float()
    return x


def _places(
    start: torch.Tensor, token: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, flat index), int64 each, of the entries of compressed rows."""
    rows = torch.arange(len(start) - 1, device=start.device)
    owner = rows.repeat_interleave(start.diff(), output_size=len(token))
    return owner, owner * vocab + token


# Score tokens -------------------------------------------------------------------------------------
#
# Log-probabilities of given tokens, and of the best ones, from logits as they are:
#
# y[r, t] = x[r, t] - log sum_i exp(x[r, i])
#
# The best rank by logit, equal ones by id (`ranking`).


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Scores:
    """Score tokens (`interface.ScoreTokens`). No operation waits for a device."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    index = tokens.to(torch.int64).clamp(min=0).unsqueeze(1)
    logprobs = (logits.gather(1, index) - normaliser).squeeze(1)
    logprobs = torch.where(tokens < 0, float("nan"), logprobs)
    if not top:
        none = logprobs.new_empty(len(tokens), 0)
        return logprobs, none.to(torch.int32), none
    ids = best_ids(logits, top)
    return logprobs, ids.to(torch.int32), logits.gather(1, ids) - normaliser


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `interface.TokenLogprobs`."""
    found, _, _ = score_tokens(logits, tokens, 0)
    return found if out is None else out.copy_(found)


# Automaton ----------------------------------------------------------------------------------------
#
# Steps of finite automata whose tokens fall into classes (`interface.AutomatonTables`).
#
# y[r] = next_state[next_start[x[r]] + token_class[class_row[x[r]], t]],  t = tokens[source[r]]
#
# where source[r] is not negative, x[r] elsewhere; the mask that follows is mask_of[y[r]].


DEAD = 0


def step_automata(
    states: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    tables: AutomatonTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance automata: states, source, rows int32 [R], tokens int32 [P] -> (states, rows), int32
    [R] each."""
    vocab = tables.token_class.shape[1]
    before = states.clamp(min=0).long()
    taken = tokens.index_select(0, source.clamp(min=0)).long()
    place = tables.class_row[before] * vocab + taken.clamp(0, vocab - 1)
    classes = tables.token_class.view(-1)[place]
    after = tables.next_state[tables.next_start[before] + classes]
    after = torch.where((taken >= 0) & (taken < vocab), after, DEAD)
    found = torch.where((source >= 0) & (states >= 0), after, states)
    masks = tables.mask_of[found.clamp(min=0).long()]
    return found, torch.where(found >= 0, masks, rows)


# Pick tokens --------------------------------------------------------------------------------------


NO_TOKEN = -1
FIRST_RANKED = 256
MORE_RANKED = 16
"""Growth factor on a CPU for the number of ranked tokens of a row, until the cut is among them. The
first number is `FIRST_RANKED`."""


def pick_tokens(
    logits: torch.Tensor, rows: PickRows, choice: Choice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Pick tokens from logits float32 or bfloat16 [R, V], not changed -> int32 [R]."""
    x = logits.to(torch.float32, copy=rows.mask_row is not None)
    if rows.mask_row is not None:
        assert rows.mask_table is not None
        apply_masks(x, rows.mask_table, rows.mask_row)
    best, token = x.max(dim=1)  # NaN is larger than everything, the first of equals counts
    if choice != "greedy":
        drawn = _drawn(x, best, rows, choice)
        token = torch.where(rows.params["temperature"] > 0, drawn, token)
    token = torch.where(best.isfinite(), token, NO_TOKEN).to(torch.int32)
    return token if out is None else out.copy_(token)


def _drawn(x: torch.Tensor, best: torch.Tensor, rows: PickRows, choice: Choice) -> torch.Tensor:
    # Greedy rows draw nothing, so any temperature will do.
    temperature = rows.params["temperature"]
    temperature = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    # In place: fresh memory of this size costs a CPU more than the arithmetic.
    weights = x.double().sub_(best.unsqueeze(1)).div_(temperature).exp_()
    if choice == "cut":
        weights.masked_fill_(~_kept_tokens(x, weights, rows), 0.0)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    target = uniforms(rows.seed, rows.position).unsqueeze(1) * total
    # u < 1, but u * total may round up to total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _kept_tokens(x: torch.Tensor, weights: torch.Tensor, rows: PickRows) -> torch.Tensor:
    """Return bool [R, V]: the tokens that top-k, top-p and min-p keep."""
    vocab = x.shape[1]
    above = weights >= rows.params["min_p"].unsqueeze(1)
    top_k, top_p = rows.params["top_k"].clamp(max=vocab), rows.params["top_p"]
    if x.device.type != "cpu":
        return above & _in_prefix(x, weights, top_k, top_p, vocab)[0]
    pending = ((top_k < vocab) | (top_p < 1.0)).nonzero().squeeze(1)
    ranked = FIRST_RANKED
    while len(pending):
        ranked = min(ranked, vocab)
        undecided = x[pending], weights[pending], top_k[pending], top_p[pending]
        inside, decided = _in_prefix(*undecided, ranked)
        above[pending[decided]] &= inside[decided]
        pending = pending[~decided]
        ranked *= MORE_RANKED
    return above


def _in_prefix(
    x: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, ranked: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two arrays: bool [R, V], the tokens that top-k and top-p keep among each row's
    `ranked` best; bool [R], whether these cuts keep no other tokens."""
    vocab = x.shape[1]
    ids = best_ids(x, ranked)
    in_top_k = torch.arange(ranked, device=x.device) < top_k.unsqueeze(1)
    by_rank = weights.gather(1, ids) * in_top_k
    reached = by_rank.cumsum(1)
    # Top-p is a share of what top-k keeps; without top-k, of all tokens, summed in order of ids.
    mass = torch.where(top_k < vocab, reached[:, -1], weights.cumsum(1)[:, -1])
    in_top_p = reached - by_rank < (top_p * mass).unsqueeze(1)
    inside = in_top_k & (in_top_p | (top_p == 1.0).unsqueeze(1))
    # Both keep a prefix: it ends among the ranked ones if the last of them is out. With fewer than
    # k ranked, the mass of the k best is not known yet.
    ends = ~inside[:, -1] & ((top_k <= ranked) | (top_k == vocab))
    decided = ends | (top_k == ranked) | (ranked == vocab)
    return torch.zeros_like(x, dtype=torch.bool).scatter_(1, ids, inside), decided
