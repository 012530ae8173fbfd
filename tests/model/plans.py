"""Step plans made by hand, so that the model is tested without the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.contracts.plan import MaskRow, PromptScoreRow, SampleRow, StepPlan
from rootlace.wire.protocol import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3, seed=0)


class Blocks:
    """Hands out free blocks in a shuffled order, so that tables are never consecutive."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self._free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken


@dataclass
class Row:
    """A sequence: its tokens, how many of them have KV, its block table."""

    blocks: Blocks
    token_ids: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.token_ids)

    def reserve(self, tokens: int) -> None:
        size = self.blocks.block_size
        self.table += self.blocks.take(-(-tokens // size) - len(self.table))

    def slot(self, position: int) -> int:
        size = self.blocks.block_size
        return self.table[position // size] * size + position % size


@dataclass(frozen=True)
class Work:
    """Work of a row in a step: compute `count` tokens (None: all remaining ones)."""

    row: Row
    count: int | None = None
    params: SamplingParams | None = GREEDY
    mask: np.ndarray | MaskRow | None = None
    banned: tuple[int, ...] = ()
    score_from: int | None = None
    """Score the prompt's tokens from this index on that this step's new tokens predict."""
    score_top: int = 0


def make_plan(
    work: Sequence[Work],
    copies: Sequence[tuple[int, int, int]] = (),
    duplicates: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """One step; marks the rows' tokens as computed. `duplicates`: (flat token, slot) pairs."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_start = [0]
    samples, scores = [], []
    for index, item in enumerate(work):
        row = item.row
        left = len(row.token_ids) - row.computed
        count = left if item.count is None else item.count
        assert 0 < count <= left
        begin, end = row.computed, row.computed + count
        row.reserve(end)
        token_ids += row.token_ids[begin:end]
        positions += range(begin, end)
        slots += [row.slot(position) for position in range(begin, end)]
        if item.score_from is not None:
            first = max(begin, item.score_from - 1)
            targets = np.array(row.token_ids[first + 1 : end + 1], dtype=np.int32)
            if len(targets):
                flat = row_start[-1] + first - begin
                scores.append(PromptScoreRow(index, flat, targets, item.score_top))
        row_start.append(row_start[-1] + count)
        row.computed = end
        if item.params is not None and end == len(row.token_ids):
            ids = np.array(row.token_ids, dtype=np.int32)
            samples.append(
                SampleRow(index, item.params, ids, row.prompt_len, item.mask, item.banned)
            )
    width = max(len(item.row.table) for item in work)
    tables = np.full((len(work), width), -1, dtype=np.int32)
    for index, item in enumerate(work):
        tables[index, : len(item.row.table)] = item.row.table
    return StepPlan(
        step=0,
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
        row_start=np.array(row_start, dtype=np.int32),
        context_len=np.array([item.row.computed for item in work], dtype=np.int32),
        block_tables=tables,
        copies=np.array(copies, dtype=np.int32).reshape(-1, 3),
        duplicate_tokens=np.array([token for token, _ in duplicates], dtype=np.int32),
        duplicate_slots=np.array([slot for _, slot in duplicates], dtype=np.int64),
        samples=samples,
        prompt_scores=scores,
    )
