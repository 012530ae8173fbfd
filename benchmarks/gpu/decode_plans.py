"""Decode steps planned by hand: rows of a given context, tokens fed from the step before.

The executor is measured with them alone, without scheduler, tree or engine.
"""

from __future__ import annotations

import numpy as np

from rootlace.runtime.contracts.plan import SampleRow, StepPlan
from rootlace.wire.protocol import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


class DecodePlans:
    """Consecutive steps of `rows` rows that start with `context` tokens of KV each."""

    def __init__(
        self,
        rows: int,
        context: int,
        steps: int,
        block_size: int,
        vocab_size: int,
        params: SamplingParams = GREEDY,
    ) -> None:
        self._rows = rows
        self._context = context
        self._steps = steps
        self._params = params
        random = np.random.default_rng(0)
        width = -(-(context + steps + 1) // block_size)
        self.num_blocks = rows * width
        self._tables = random.permutation(self.num_blocks).astype(np.int32).reshape(rows, width)
        self._block_size = block_size
        self._known = random.integers(2, vocab_size, context + 1).astype(np.int32)
        self._made = 0

    def __iter__(self) -> DecodePlans:
        return self

    def __next__(self) -> StepPlan:
        """The next step; its tokens are those that the plan before finds, but in the first."""
        if self._made == self._steps:
            raise StopIteration
        number, rows, size = self._made, self._rows, self._block_size
        self._made += 1
        position = self._context + number
        length = position + 1
        used = -(-length // size)
        index = np.arange(rows, dtype=np.int32)
        fed = number > 0
        slots = self._tables[:, position // size].astype(np.int64) * size + position % size
        return StepPlan(
            step=number,
            token_ids=np.full(rows, self._known[-1], np.int32),
            positions=np.full(rows, position, np.int32),
            slots=slots,
            row_start=np.arange(rows + 1, dtype=np.int32),
            context_len=np.full(rows, length, np.int32),
            block_tables=self._tables[:, :used],
            copies=np.empty((0, 3), np.int32),
            duplicate_tokens=np.empty(0, np.int32),
            duplicate_slots=np.empty(0, np.int64),
            samples=[
                SampleRow(
                    row=row,
                    params=self._params,
                    token_ids=self._known,
                    prompt_len=self._context,
                    source=row if fed else -1,
                )
                for row in range(rows)
            ],
            feeds=np.stack((index, index), axis=1) if fed else np.empty((0, 2), np.int32),
        )
