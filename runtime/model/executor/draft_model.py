"""Run a draft model beside the served model: with its own weights, and KV in its own blocks.

 block of the plan    17: t t t t     18: t t t .      of one table, in both pools
 the model's pool     17: k v k v     18: k v k .
 the draft model's    17: k v k v     18: . . . .      computed once a draft asks for it

Block numbers are the scheduler's, so tree, preemption and eviction know one pool. Only this module
knows the draft model's content of a block: the token whose keys and values lie in each slot.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.runtime.contracts.block_store import LOAD
from rootlace.runtime.contracts.plan import DraftRow, ModelDrafts, SampleRow, StepPlan
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.executor.cpu_setup import LoadedModel, on_cpu, why_not_native
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.steps import Beside, ModelSetup
from rootlace.runtime.model.kv_pool import block_bytes, plan_of_rows
from rootlace.runtime.model.weight_cache import WeightCache
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sampling import SamplingParams

log = logging.getLogger(__name__)

_UNKNOWN = -1
_TIMED_STEPS = 4
_MOST_PARAMS = 1024

_NO_TOKENS = np.empty(0, np.int32)


# Setup --------------------------------------------------------------------------------------------


def check_drafted_for(draft: ModelSetup, device: str, *, native: bool) -> None:
    """Raise `InvalidRequest` if the model's `device` is not a CPU, or its kernels are not `native`.
    Other kernels sum in an order that depends on drafts, and so would the text."""
    reason = None
    if device != "cpu":
        reason = f"served on a CPU only, and the model runs on {device}"
    elif not native:
        reason = "served with native kernels only, which do not run the model"
    else:
        why = why_not_native(draft.config, draft.kv_dtype, draft.cache.block_size)
        reason = None if why is None else f"native kernels do not run it: {why}"
    if reason is not None:
        raise InvalidRequest(f"draft_model {draft.config.path}: {reason}")


def taken_beside(draft: ModelSetup) -> Beside:
    """Return the memory that the draft model takes."""
    weights = weight_bytes(draft.config, draft.dtype, draft.executor.quantize, head_apart=True)
    return Beside(weights, block_bytes(draft.config, draft.cache.block_size, draft.kv_dtype))


def load_draft(
    draft: ModelSetup, model: LoadedModel, weight_cache: WeightCache | None
) -> DraftDecoder:
    """Load the draft model beside `model`, on the same threads, with as many blocks. Raises as
    `on_cpu` does."""
    check_drafted_for(draft, "cpu", native=model.kernels == "native")
    cache = dataclasses.replace(draft.cache, num_blocks=model.pool.shape[2])
    found = on_cpu(replace(draft, cache=cache), weight_cache, model.team)
    steps = PlainSteps(found.forward, found.sampling, found.damage)
    length, vocab_size = found.setup.context_length, found.forward.vocab_size
    decoder = DraftDecoder(steps, model, length, vocab_size)
    milliseconds = 1e3 * decoder.step_seconds
    log.info("the draft model %s takes %.3g ms a token", draft.config.path, milliseconds)
    return decoder


# Drafts -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Chunk:
    """Tokens `begin : end` of a row, to compute. `place`: index of the row. `tokens`: the row's,
    with room for its draft. `slots`: of all tokens. The first `skipped` tokens, whole blocks, are
    left out of the context."""

    place: int
    row: DraftRow
    tokens: np.ndarray
    slots: np.ndarray
    begin: int
    end: int
    skipped: int = 0

    @property
    def samples(self) -> bool:
        """Whether a token is sampled behind the chunk."""
        return self.end >= len(self.row.token_ids)

    def behind(self) -> _Chunk:
        """Return the chunk of the one token behind."""
        return _Chunk(
            *(self.place, self.row, self.tokens, self.slots),
            *(self.end, self.end + 1, self.skipped),
        )


class DraftDecoder:
    """Decoder of drafts: see `contracts.plan.DraftModel`. Not thread-safe.

    A write by the model to a slot makes the draft model's content there invalid. The content stays
    valid only if the draft model computed the same token for the same step. Nothing is copied
    between blocks: copied rows are few, and a draft that needs them computes them again.
    """

    first = 0
    """First position that has keys and values."""
    keeps_drafted = True
    """Whether a drafted token's keys and values stay valid once the token is accepted."""

    def __init__(
        self, steps: PlainSteps, model: LoadedModel, context_length: int, vocab_size: int
    ) -> None:
        """`model`: the served model. Its vocabulary or the draft model's of `vocab_size` may be
        padded beyond the tokens that both have."""
        self._steps = steps
        num_blocks, self._size = model.pool.shape[2:4]
        self.context_length = context_length
        self._vocab_size = vocab_size
        self._known = model.forward.vocab_size
        self._held = np.full(num_blocks * self._size, _UNKNOWN, np.int32)
        """Token whose keys and values are in each slot."""
        self._fresh = np.zeros(len(self._held), bool)
        """Slots computed for the step being planned."""
        self._written: list[np.ndarray] = []
        """Fresh slots, as lists."""
        self._used = False
        """Whether anything was computed yet."""
        self._params: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        """Parameters of a row and those of its draft, by the identity of the first."""
        self.step_seconds = self._measure()

    # ------------------------------------------------------------ what there is

    def missing(self, token_ids: np.ndarray, table: np.ndarray) -> int:
        """Count the tokens to compute before a draft: see `DraftModel`."""
        length = len(token_ids)
        return length - self._begin(token_ids, table)[0] or length

    def _begin(self, token_ids: np.ndarray, table: np.ndarray) -> tuple[int, int]:
        """Return the first token to compute before a draft (the row's length: no draft), and the
        number of skipped tokens. The last token is always computed, for its logits."""
        return self._first_unlike(token_ids, table, 0), 0

    def _first_unlike(self, token_ids: np.ndarray, table: np.ndarray, begin: int) -> int:
        """Return the first token to compute, from `begin` on."""
        count = len(token_ids) - 1
        agree = self._held[self._slots(table, count)[begin:]] == token_ids[begin:count]
        return count if agree.all() else begin + int(agree.argmin())

    def launched(self, plan: StepPlan) -> None:
        """Note the slots that a step of the model writes to."""
        if not self._used:
            return
        held, fresh = self._held, self._fresh
        stale = ~fresh[plan.slots]
        stale |= held[plan.slots] != plan.token_ids
        held[plan.slots[stale]] = _UNKNOWN
        held[plan.duplicate_slots] = _UNKNOWN
        for _, block, rows in plan.copies.tolist():
            held[block * self._size : block * self._size + rows] = _UNKNOWN
        self._forget_fresh()

    def moved(self, moves: np.ndarray) -> None:
        """Note the blocks loaded from below the pool: see `contracts.block_store`."""
        if self._used and len(moves):
            loaded = moves[moves[:, 0] == LOAD, 3]
            self._held.reshape(-1, self._size)[loaded] = _UNKNOWN

    def _forget_fresh(self) -> None:
        for slots in self._written:
            self._fresh[slots] = False
        self._written.clear()

    def _slots(self, table: np.ndarray, count: int) -> np.ndarray:
        """Return the slots of the first `count` tokens, int64."""
        size = self._size
        blocks = table[: -(-count // size)].astype(np.int64)
        slots: np.ndarray = (blocks[:, None] * size + np.arange(size)).ravel()[:count]
        return slots

    # ------------------------------------------------------------ drafting

    def draft(self, rows: Sequence[DraftRow]) -> ModelDrafts:
        """Draft tokens: see `DraftModel`. If rows lack the same tokens of a shared block, one row
        computes the tokens, and the other rows get no draft.

        Tokens are sampled as the model would, with the row's parameters and the random numbers of
        its positions: such a draft is accepted more often than the best token.
        """
        started = time.perf_counter()
        self._forget_fresh()
        self._used = True
        drafts: list[list[int]] = [[] for _ in rows]
        chunks: list[_Chunk] = []
        for at, row in enumerate(rows):
            length = len(row.token_ids)
            begin, skipped = self._begin(row.token_ids, row.table)
            if begin == length:
                continue
            end = min(begin + row.compute, length)
            slots = self._slots(row.table, length + row.count - 1)
            if self._fresh[slots[begin]]:
                continue
            tokens = np.empty(length + row.count, np.int32)
            tokens[:length] = row.token_ids
            chunks.append(_Chunk(at, row, tokens, slots, begin, end, skipped))
            self._fresh[slots[begin:end]] = True
        computed = sum(chunk.end - chunk.begin for chunk in chunks)
        self._step(chunks, drafts)
        seconds, steps = time.perf_counter() - started, 0
        while True:
            chunks = [
                c.behind()
                for c in chunks
                if 0 < len(drafts[c.place]) < c.row.count
                and drafts[c.place][-1] >= 0
                and c.end < self.context_length
            ]
            if not chunks:
                break
            self._step(chunks, drafts)
            steps += 1
        for draft in drafts:
            if draft and draft[-1] < 0:
                del draft[-1]
        whole = time.perf_counter() - started
        return ModelDrafts(drafts, computed, seconds, steps, whole - seconds)

    def _step(self, chunks: list[_Chunk], drafts: list[list[int]]) -> None:
        """Compute the chunks, and append a token to each draft whose chunk ends its row; -1 ends a
        draft."""
        if not chunks:
            return
        samples = [
            SampleRow(
                index,
                self._drafted_with(chunk.row.params),
                chunk.tokens[: chunk.end],
                chunk.row.prompt_len,
                simple=chunk.row.simple,
            )
            for index, chunk in enumerate(chunks)
            if chunk.samples
        ]
        counts = [chunk.end - chunk.begin for chunk in chunks]
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        contexts = ends - np.array([chunk.skipped for chunk in chunks], np.int32)
        tables = np.zeros((len(chunks), -(-int(contexts.max()) // self._size)), np.int32)
        for table, chunk in zip(tables, chunks, strict=True):
            blocks = chunk.row.table[chunk.skipped // self._size : -(-chunk.end // self._size)]
            table[: len(blocks)] = blocks
        token_ids = np.concatenate([chunk.tokens[chunk.begin : chunk.end] for chunk in chunks])
        slots = np.concatenate([chunk.slots[chunk.begin : chunk.end] for chunk in chunks])
        plan = StepPlan(
            step=0,
            # A padded vocabulary may have ids that the draft model lacks: clamp them.
            token_ids=np.minimum(token_ids, self._vocab_size - 1),
            positions=np.concatenate([np.arange(c.begin, c.end, dtype=np.int32) for c in chunks]),
            slots=slots,
            row_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            context_len=contexts,
            block_tables=tables,
            samples=samples,
        )
        # Before the step: if it fails, the slots' contents are unknown.
        self._held[slots] = _UNKNOWN
        result = self._steps.collect(self._steps.launch(plan))
        self._held[slots] = token_ids
        self._written.append(slots)
        for chunk in chunks:
            known = chunk.end <= len(chunk.row.token_ids)
            self._fresh[chunk.slots[chunk.begin : chunk.end]] = known or self.keeps_drafted
        found = iter(result.token_ids.tolist())
        for chunk in chunks:
            if chunk.samples:
                token = next(found)
                if token < 0:  # else it would be asked again, and again for nothing
                    raise ArithmeticError("the draft model's logits are not numbers")
                if token >= self._known:
                    token = _UNKNOWN
                drafts[chunk.place].append(token)
                chunk.tokens[chunk.end] = max(token, 0)

    def _drafted_with(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters without scores; the same object for the same parameters, by which
        the sampler knows a sequence."""
        if not params.logprobs:
            return params
        known = self._params.get(id(params))
        if known is None or known[0] is not params:
            if len(self._params) > _MOST_PARAMS:
                self._params.clear()
            plain = msgspec.structs.replace(params, logprobs=False, top_logprobs=0)
            known = self._params[id(params)] = params, plain
        return known[1]

    def _measure(self) -> float:
        """Measure the seconds of a step of one token; writes to the first block."""
        seconds = []
        for _ in range(_TIMED_STEPS):
            params = SamplingParams(temperature=0.0, seed=0)
            samples = [SampleRow(0, params, _NO_TOKENS, 0, simple=True)]
            token = np.zeros(1, np.int32)
            plan = plan_of_rows([token], self._size, begin=self.first, samples=samples)
            started = time.perf_counter()
            self._steps.collect(self._steps.launch(plan))
            seconds.append(time.perf_counter() - started)
        return min(seconds)
