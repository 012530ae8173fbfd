"""An executor without a model: a cost model, made-up tokens, and memory that tells on bad plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.scheduler.plan import (
    MaskRow,
    SampleRow,
    StepPlan,
    StepResult,
    TokenScores,
)

_BASE = 0x9E3779B97F4A7C15 | 1


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step, linear in what it does.

    `step + token * (tokens computed) + context * (sum of the rows' context lengths)
    + copy * (blocks copied)`. The defaults are of the order of a 1B model on a data-centre GPU.
    """

    step: float = 5e-3
    token: float = 2e-5
    context: float = 2e-8
    copy: float = 1e-6

    def seconds(self, plan: StepPlan) -> float:
        return (
            self.step
            + self.token * plan.num_tokens
            + self.context * int(plan.context_len.sum())
            + self.copy * len(plan.copies)
        )


class BadPlan(AssertionError):
    """The plan would have computed something wrong."""


class SimulatedExecutor:
    """Runs plans on hashes instead of tensors.

    The "KV" of a token is the hash of the sequence up to it, computed from what the memory holds
    of the tokens before, so a wrong slot, copy or duplicate gives other tokens. The next token
    depends on this hash alone (and on masks and bans): the same history gives the same token,
    whatever is cached.

    With `verify` the memory also knows token and position of each slot, is initially garbage, and
    every row's whole context is looked at as attention would: raises `BadPlan` at the first slot
    that holds anything but its own sequence's KV. That costs O(context) per row.

    Time is virtual: `clock()` gives the seconds simulated so far.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        context_length: int = 1 << 20,
        vocab_size: int = 32000,
        cost: CostModel | None = None,
        verify: bool = False,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._cost = cost or CostModel()
        self._verify = verify
        self._seconds = 0.0
        slots = num_blocks * block_size
        self._hashes = np.full(slots, 0xDEAD, np.uint64)
        self._tokens = np.full(slots if verify else 0, -1, np.int32)
        self._positions = np.full(slots if verify else 0, -1, np.int32)
        self._powers = np.ones(1, np.uint64)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def clock(self) -> float:
        """Virtual seconds since the start."""
        return self._seconds

    def run(self, plan: StepPlan) -> StepResult:
        """Raises BadPlan (only with `verify`)."""
        self._seconds += self._cost.seconds(plan)
        if self._verify:
            self._check_shape(plan)
        self._copy(plan)
        self._write(plan)
        if self._verify:
            self._attend(plan)
        if plan.wait_for_masks is not None:
            plan.wait_for_masks()
        ends = plan.row_start[1:] - 1
        hashes = self._hashes[plan.slots[ends]]
        tokens = np.array(
            [self.next_token(int(hashes[sample.row]), sample) for sample in plan.samples], np.int32
        )
        scores = (
            [
                self._scores(hashes[sample.row : sample.row + 1], token, sample.params.top_logprobs)
                if sample.params.logprobs
                else None
                for sample, token in zip(plan.samples, np.split(tokens, len(tokens)), strict=True)
            ]
            if len(tokens)
            else []
        )
        prompt_scores = []
        for row in plan.prompt_scores:
            flat = slice(row.flat_start, row.flat_start + len(row.targets))
            seen = self._hashes[plan.slots[flat]]
            prompt_scores.append(self._scores(seen, row.targets, row.top_logprobs))
        return StepResult(tokens, scores, prompt_scores)

    # ------------------------------------------------------------ made-up model

    def next_token(self, history: int, sample: SampleRow) -> int:
        """What follows a sequence whose hash (see `history_hash`) is `history`."""
        mixed = int(_mix(np.array([history], np.uint64))[0])
        if sample.mask is None and not sample.banned:
            return mixed % self._vocab_size
        allowed = np.ones(self._vocab_size, bool)
        mask = sample.mask
        if mask is not None:
            words = mask.table.rows[mask.row] if isinstance(mask, MaskRow) else mask
            bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")
            allowed = bits[: self._vocab_size].astype(bool)
        allowed[list(sample.banned)] = False
        choices = np.flatnonzero(allowed)
        return int(choices[mixed % len(choices)]) if len(choices) else -1

    def _scores(self, history: np.ndarray, targets: np.ndarray, top: int) -> TokenScores:
        """n histories (uint64) and n targets -> scores that depend on both alone."""
        count = len(targets)
        ranks = np.arange(top, dtype=np.int32)
        return TokenScores(
            logprobs=made_up_logprobs(history, targets),
            top_ids=np.tile(ranks, (count, 1)),
            top_logprobs=np.tile(-ranks.astype(np.float32), (count, 1)),
        )

    # ------------------------------------------------------------ memory

    def _copy(self, plan: StepPlan) -> None:
        size = self._block_size
        for source, target, rows in plan.copies.tolist():
            a, b = source * size, target * size
            for memory in (self._hashes, self._tokens, self._positions):
                if len(memory):
                    memory[b : b + rows] = memory[a : a + rows]

    def _write(self, plan: StepPlan) -> None:
        """Hash of each new token: that of the token before it plus its own term.

        Rows in order of their first position: what a row reads of this very step, a row that
        starts further left has written.
        """
        size = self._block_size
        self._grow_powers(int(plan.context_len.max(initial=0)))
        terms = (plan.token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[plan.positions]
        if self._verify:
            self._tokens[plan.slots] = plan.token_ids
            self._positions[plan.slots] = plan.positions
            self._tokens[plan.duplicate_slots] = plan.token_ids[plan.duplicate_tokens]
            self._positions[plan.duplicate_slots] = plan.positions[plan.duplicate_tokens]
        order = np.argsort(plan.positions[plan.row_start[:-1]], kind="stable")
        row_of_duplicate = np.searchsorted(plan.row_start, plan.duplicate_tokens, "right") - 1
        duplicated = set(row_of_duplicate.tolist())
        for row in order.tolist():
            first, stop = int(plan.row_start[row]), int(plan.row_start[row + 1])
            start = int(plan.positions[first])
            before = np.uint64(0)
            if start:
                block = int(plan.block_tables[row, (start - 1) // size])
                before = self._hashes[block * size + (start - 1) % size]
            self._hashes[plan.slots[first:stop]] = np.cumsum(terms[first:stop]) + before
            if row in duplicated:
                mine = row_of_duplicate == row
                sources = plan.slots[plan.duplicate_tokens[mine]]
                self._hashes[plan.duplicate_slots[mine]] = self._hashes[sources]

    def _grow_powers(self, count: int) -> None:
        if count > len(self._powers):
            factors = np.full(max(2 * count, 1024), _BASE, np.uint64)
            factors[0] = 1
            self._powers = np.cumprod(factors, dtype=np.uint64)

    # ------------------------------------------------------------ verification

    def _check_shape(self, plan: StepPlan) -> None:
        """What can be said of a plan without knowing the memory."""
        size = self._block_size
        written = np.concatenate((plan.slots, plan.duplicate_slots))
        if len(np.unique(written)) != len(written):
            raise BadPlan("a slot is written twice")
        if np.isin(plan.copies[:, 0], plan.copies[:, 1]).any():
            raise BadPlan("the source of a copy is the destination of another")
        if len(np.unique(plan.copies[:, 1])) != len(plan.copies):
            raise BadPlan("a block is the destination of two copies")
        for _, target, rows in plan.copies.tolist():
            if np.isin(np.arange(target * size, target * size + rows), written).any():
                raise BadPlan(f"block {target} is copied to and written at the same slots")
        for row in range(plan.num_rows):
            flat = slice(int(plan.row_start[row]), int(plan.row_start[row + 1]))
            where = plan.positions[flat]
            end = int(plan.context_len[row])
            if not np.array_equal(where, np.arange(end - len(where), end)) or not len(where):
                raise BadPlan(f"row {row}: positions are not the last of its context")
            slots = plan.block_tables[row, where // size].astype(np.int64) * size + where % size
            if not np.array_equal(slots, plan.slots[flat]):
                raise BadPlan(f"row {row}: slots are not those of its table")

    def _attend(self, plan: StepPlan) -> None:
        size = self._block_size
        samples = {sample.row: sample for sample in plan.samples}
        for row in range(plan.num_rows):
            where = np.arange(int(plan.context_len[row]))
            slots = plan.block_tables[row, where // size].astype(np.int64) * size + where % size
            tokens = self._tokens[slots]
            wrong = np.flatnonzero(self._positions[slots] != where)
            if len(wrong):
                raise BadPlan(f"row {row}: no KV of position {wrong[0]} in slot {slots[wrong[0]]}")
            hashes = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._powers[where])
            wrong = np.flatnonzero(self._hashes[slots] != hashes)
            if len(wrong):
                raise BadPlan(f"row {row}: slot {slots[wrong[0]]} holds another sequence's KV")
            sample = samples.get(row)
            if sample is not None and not np.array_equal(sample.token_ids, tokens):
                raise BadPlan(f"row {row}: the context is not the request's tokens")


def made_up_logprobs(history: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float32 in (-10, 0], a function of history (uint64 [n]) and target (int32 [n])."""
    mixed = _mix(history ^ _mix(targets.astype(np.uint64)))
    return -(mixed % np.uint64(1000)).astype(np.float32) / 100


def history_hash(tokens: np.ndarray) -> np.ndarray:
    """The hash after each of `tokens` (uint64 [n]), from the tokens alone."""
    factors = np.full(len(tokens), _BASE, np.uint64)
    if len(tokens):
        factors[0] = 1
    powers = np.cumprod(factors, dtype=np.uint64)
    return np.cumsum((np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
