"""An executor without a model: a cost model, made-up tokens, and memory that tells on bad plans."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rootlace.runtime.cache.radix_tree import distinct
from rootlace.runtime.contracts.block_store import LOAD, SAVE
from rootlace.runtime.contracts.plan import (
    MaskRow,
    SampleRow,
    StepPlan,
    StepResult,
    TokenScores,
)
from tests.simulated_store import SimulatedStore

_BASE = 0x9E3779B97F4A7C15 | 1


class CostModel(msgspec.Struct, frozen=True):
    """Seconds of a step, linear in what it does.

    On the device: `step + token * (tokens computed) + sample * (tokens sampled)
    + context * (sum of the rows' context lengths) + copy * (blocks copied)`; the defaults are of
    the order of a 1B model on a data-centre GPU.
    On the host, before the device can begin: `host + host_row * rows`; the defaults are of the
    order of what planning and committing take (0.3 ms with 64 rows).
    """

    step: float = 5e-3
    token: float = 2e-5
    context: float = 2e-8
    copy: float = 1e-6
    sample: float = 0.0
    host: float = 2e-5
    host_row: float = 5e-6

    def device_seconds(self, plan: StepPlan) -> float:
        return (
            self.step
            + self.token * plan.num_tokens
            + self.context * int(plan.context_len.sum())
            + self.copy * len(plan.copies)
            + self.sample * len(plan.samples)
        )

    def host_seconds(self, plan: StepPlan) -> float:
        return self.host + self.host_row * plan.num_rows


@dataclass(eq=False)
class SimulatedStep:
    """A step under way. `done`: when the device has done it, as far as that is settled."""

    plan: StepPlan
    done: float
    samples: Sequence[SampleRow] | None = None
    """None until a late plan's final rows are there."""
    tokens: list[int] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)
    """Per sample the hash of the sequence up to the sampled token."""
    moves: list[list[int]] = field(default_factory=list)
    """What is moved before it."""


class BadPlan(AssertionError):
    """The plan would have computed something wrong."""


class SimulatedExecutor:
    """Runs plans on hashes instead of tensors.

    The "KV" of a token is the hash of the sequence up to it, computed from what the memory holds
    of the tokens before, so a wrong slot, copy or duplicate gives other tokens. An adapter gives
    every sequence another beginning. The next token
    depends on this hash alone (and on masks and bans): the same history gives the same token,
    whatever is cached.

    With `verify` the memory also knows token and position of each slot, is initially garbage, and
    every row's whole context is looked at as attention would: raises `BadPlan` at the first slot
    that holds anything but its own sequence's KV. That costs O(context) per row.

    A launched step is computed as late as it can be, when its result is collected, so that whatever
    the host changes too early shows. With `verify`, what a row says of its unknown token is
    compared with what the step before found for the very same sequence.

    Time is virtual: `clock()` gives the seconds of the host, which takes some to launch a step and
    waits for the device when it collects. With `overlaps` the device works meanwhile, step by step;
    without, the host waits for each step when it launches it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        context_length: int = 1 << 20,
        vocab_size: int = 32000,
        cost: CostModel | None = None,
        verify: bool = False,
        overlaps: bool = False,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._cost = cost or CostModel()
        self._verify = verify
        self._overlaps = overlaps
        self._host = 0.0
        self._device = 0.0
        self._busy = 0.0
        self._launched: deque[SimulatedStep] = deque()
        self._before: SimulatedStep | None = None
        """The step computed last."""
        self._moves: list[list[int]] = []
        self.stores: list[SimulatedStore] = []
        """What is below the pool."""
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

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def clock(self) -> float:
        """Virtual seconds since the start."""
        return self._host

    @property
    def device_seconds(self) -> float:
        """How many of them the device worked."""
        return self._busy

    # ------------------------------------------------------------ steps

    def run(self, plan: StepPlan) -> StepResult:
        """Raises BadPlan (only with `verify`)."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> SimulatedStep:
        if len(self._launched) == 2:
            raise BadPlan("two steps are under way")
        if any(step.samples is None for step in self._launched):
            raise BadPlan("the late step before was not sampled")
        if not self._launched and (len(plan.feeds) or any(s.source >= 0 for s in plan.samples)):
            raise BadPlan("a plan feeds on a step that is not under way")
        self._host += self._cost.host_seconds(plan)
        seconds = self._cost.device_seconds(plan)
        self._busy += seconds
        self._device = max(self._device, self._host) + seconds
        step = SimulatedStep(plan, self._device, None if plan.late else plan.samples)
        step.moves, self._moves = self._moves, []
        self._launched.append(step)
        if not self._overlaps:
            self._host = self._device
        return step

    def sample(self, launched: SimulatedStep, samples: Sequence[SampleRow]) -> None:
        """Raises BadPlan."""
        plan = launched.plan
        if launched.samples is not None or not plan.late:
            raise BadPlan("a step is sampled twice")
        if launched is not self._launched[0]:
            raise BadPlan("a late step is sampled before the one before it is collected")
        if [row.row for row in samples] != [row.row for row in plan.samples]:
            raise BadPlan("the final samples are not those of the plan")
        if any(row.late for row in samples):
            raise BadPlan("a final sample is late")
        launched.samples = samples
        self._device = launched.done = max(launched.done, self._host)

    def collect(self, launched: SimulatedStep) -> StepResult:
        """Raises BadPlan (only with `verify`, but for the order of calls)."""
        if not self._launched or launched is not self._launched[0]:
            raise BadPlan("steps are collected out of order")
        self._launched.popleft()
        self._move(launched.moves)
        if launched.samples is None:
            raise BadPlan("a late step is collected before it is sampled")
        self._host = max(self._host, launched.done)
        result = self._compute(launched, launched.samples)
        self._before = launched
        return result

    def _compute(self, step: SimulatedStep, samples: Sequence[SampleRow]) -> StepResult:
        plan = step.plan
        token_ids = self._fed(plan)
        if self._verify:
            self._check_shape(plan)
        self._copy(plan)
        self._write(plan, token_ids)
        if self._verify:
            self._attend(plan, samples)
        if plan.wait_for_masks is not None:
            plan.wait_for_masks()
        ends = [int(plan.row_start[sample.row + 1]) - 1 - sample.back for sample in samples]
        hashes = self._hashes[plan.slots[ends]]
        step.histories = hashes.tolist()
        step.tokens = [
            self.next_token(history, sample, self._token_before(sample))
            for history, sample in zip(step.histories, samples, strict=True)
        ]
        scores = [
            self._scores(
                hashes[at : at + 1],
                np.array([token], np.int32),
                sample.params.top_logprobs,
            )
            if sample.params.logprobs
            else None
            for at, (sample, token) in enumerate(zip(samples, step.tokens, strict=True))
        ]
        prompt_scores = []
        for row in plan.prompt_scores:
            flat = slice(row.flat_start, row.flat_start + len(row.targets))
            seen = self._hashes[plan.slots[flat]]
            prompt_scores.append(self._scores(seen, row.targets, row.top_logprobs))
        pooled = []
        for row in plan.pooled:
            seen = self._hashes[plan.slots[row.flat_start : row.flat_start + row.count]]
            pooled.append(made_up_states(seen))
        return StepResult(np.array(step.tokens, np.int32), scores, prompt_scores, pooled)

    def _fed(self, plan: StepPlan) -> np.ndarray:
        """The plan's tokens, those among them that the step before found."""
        if not len(plan.feeds):
            return plan.token_ids
        assert self._before is not None
        found = np.array(self._before.tokens, np.int32)
        token_ids = plan.token_ids.copy()
        # Where nothing could be sampled (-1) any token does: that request ended.
        token_ids[plan.feeds[:, 0]] = np.maximum(found[plan.feeds[:, 1]], 0)
        return token_ids

    def _token_before(self, sample: SampleRow) -> int | None:
        """What the step before found for the row's last token; None if that was known."""
        if sample.source < 0:
            return None
        assert self._before is not None
        return self._before.tokens[sample.source]

    # ------------------------------------------------------------ made-up model

    def next_token(self, history: int, sample: SampleRow, before: int | None = None) -> int:
        """What follows a sequence whose hash (see `history_hash`) is `history`. Of the tokens only
        those that are penalised matter beside. `before`: the last token, if `sample` does not know
        it."""
        mixed = int(_mix(np.array([history], np.uint64))[0])
        params = sample.params
        penalised = bool(params.frequency_penalty or params.presence_penalty)
        if sample.mask is None and sample.automaton is None and not (sample.banned or penalised):
            return mixed % self._vocab_size
        allowed = self._allowed(sample, before)
        allowed[list(sample.banned)] = False
        choices = np.flatnonzero(allowed)
        if penalised and before is None:
            # As a penalty would: rather not what the output has, if there is anything else.
            fresh = np.setdiff1d(choices, sample.token_ids[sample.prompt_len :])
            choices = fresh if len(fresh) else choices
        return int(choices[mixed % len(choices)]) if len(choices) else -1

    def _allowed(self, sample: SampleRow, before: int | None) -> np.ndarray:
        """bool [vocab_size]"""
        mask = sample.mask
        if sample.automaton is not None:
            automaton, state = sample.automaton.automaton, sample.automaton.state
            if before is not None:
                known = state >= 0 and before >= 0
                state = (
                    int(automaton.next_state[state, automaton.token_class[before]]) if known else -1
                )
            if state < 0:
                return np.zeros(self._vocab_size, bool)
            mask = automaton.masks[automaton.mask_of[state]]
        if mask is None:
            return np.ones(self._vocab_size, bool)
        words = mask.table.rows[mask.row] if isinstance(mask, MaskRow) else mask
        bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

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

    def move(self, moves: np.ndarray) -> None:
        """Behind the steps under way, and before the next one."""
        self._moves += moves.tolist()
        if not self._launched:
            self._move(self._moves)
            self._moves = []

    def _move(self, moves: list[list[int]]) -> None:
        for kind, at, slot, other in moves:
            store = self.stores[at]
            if kind == LOAD:
                store.load(slot, self._block(other))
            elif kind == SAVE:
                store.save(slot, self._block(other))
            else:
                self.stores[at + 1].save(other, list(store.content[slot]))

    def _block(self, block: int) -> list[np.ndarray]:
        """Views of what the memory has of a block."""
        rows = slice(block * self._block_size, (block + 1) * self._block_size)
        return [memory[rows] for memory in (self._hashes, self._tokens, self._positions)]

    def _copy(self, plan: StepPlan) -> None:
        size = self._block_size
        for source, target, rows in plan.copies.tolist():
            a, b = source * size, target * size
            for memory in (self._hashes, self._tokens, self._positions):
                if len(memory):
                    memory[b : b + rows] = memory[a : a + rows]

    def _write(self, plan: StepPlan, token_ids: np.ndarray) -> None:
        """Hash of each new token: that of the token before it plus its own term.

        Rows in order of their first position: what a row reads of this very step, a row that
        starts further left has written.
        """
        size = self._block_size
        self._grow_powers(int(plan.context_len.max(initial=0)))
        terms = (token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[plan.positions]
        if self._verify:
            self._tokens[plan.slots] = token_ids
            self._positions[plan.slots] = plan.positions
            self._tokens[plan.duplicate_slots] = token_ids[plan.duplicate_tokens]
            self._positions[plan.duplicate_slots] = plan.positions[plan.duplicate_tokens]
        order = np.argsort(plan.positions[plan.row_start[:-1]], kind="stable")
        row_of_duplicate = np.searchsorted(plan.row_start, plan.duplicate_tokens, "right") - 1
        duplicated = set(row_of_duplicate.tolist())
        for row in order.tolist():
            first, stop = int(plan.row_start[row]), int(plan.row_start[row + 1])
            start = int(plan.positions[first])
            before = start_hash(_adapter(plan, row))
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
        if not distinct(written):
            raise BadPlan("a slot is written twice")
        if np.isin(plan.copies[:, 0], plan.copies[:, 1]).any():
            raise BadPlan("the source of a copy is the destination of another")
        if not distinct(plan.copies[:, 1]):
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

    def _attend(self, plan: StepPlan, samples: Sequence[SampleRow]) -> None:
        size = self._block_size
        samples_of: dict[int, list[SampleRow]] = {}
        for sample in samples:
            samples_of.setdefault(sample.row, []).append(sample)
        fed = dict(plan.feeds.tolist())
        for row in range(plan.num_rows):
            where = np.arange(int(plan.context_len[row]))
            slots = plan.block_tables[row, where // size].astype(np.int64) * size + where % size
            tokens = self._tokens[slots]
            wrong = np.flatnonzero(self._positions[slots] != where)
            if len(wrong):
                raise BadPlan(f"row {row}: no KV of position {wrong[0]} in slot {slots[wrong[0]]}")
            hashes = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._powers[where])
            hashes += start_hash(_adapter(plan, row))
            wrong = np.flatnonzero(self._hashes[slots] != hashes)
            if len(wrong):
                raise BadPlan(f"row {row}: slot {slots[wrong[0]]} holds another sequence's KV")
            last = int(plan.row_start[row + 1]) - 1
            if row not in samples_of and last in fed:
                raise BadPlan(f"row {row}: fed, and nothing is sampled")
            for sample in samples_of.get(row, ()):
                known = sample.token_ids
                context = tokens[: len(tokens) - sample.back]
                if sample.source >= 0:
                    self._check_source(row, sample, _adapter(plan, row))
                    if fed.get(last) != sample.source or sample.back:
                        raise BadPlan(f"row {row}: its last token is not fed from its source")
                    context = tokens[:-1]
                if not np.array_equal(known, context):
                    raise BadPlan(f"row {row}: the context is not the request's tokens")
                if sample.source >= 0 and needs_history(sample):
                    raise BadPlan(f"row {row}: penalties without the last token")

    def _check_source(self, row: int, sample: SampleRow, adapter: int) -> None:
        """Whether the sample it goes on from is of the very same sequence."""
        assert self._before is not None
        if sample.source >= len(self._before.histories):
            raise BadPlan(f"row {row}: its source is no sample of the step before")
        history = int(history_hash(sample.token_ids, adapter)[-1])
        if self._before.histories[sample.source] != history:
            raise BadPlan(f"row {row}: its source is another sequence's sample")


def needs_history(sample: SampleRow) -> bool:
    params = sample.params
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def made_up_states(history: np.ndarray) -> np.ndarray:
    """float32 [n, 2]: hidden states that depend on the histories (uint64 [n]) alone."""
    return np.stack((history % 1009, history % 997), axis=1).astype(np.float32)


def made_up_logprobs(history: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float32 in (-10, 0], a function of history (uint64 [n]) and target (int32 [n])."""
    mixed = _mix(history ^ _mix(targets.astype(np.uint64)))
    return -(mixed % np.uint64(1000)).astype(np.float32) / 100


def start_hash(adapter: int) -> np.uint64:
    """The hash before the first token, by the number of the adapter (-1: none)."""
    return np.uint64((adapter + 1) * 0xD1B54A32D192ED03 % (1 << 64))


def _adapter(plan: StepPlan, row: int) -> int:
    return int(plan.adapters[row]) if len(plan.adapters) else -1


def history_hash(tokens: np.ndarray, adapter: int = -1) -> np.ndarray:
    """The hash after each of `tokens` (uint64 [n]), from them and the adapter alone."""
    factors = np.full(len(tokens), _BASE, np.uint64)
    if len(tokens):
        factors[0] = 1
    powers = np.cumprod(factors, dtype=np.uint64)
    terms = (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers
    return np.cumsum(terms) + start_hash(adapter)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
