"""Steps planned by hand, to measure an executor alone, without scheduler and tree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rootlace.runtime.contracts.plan import SampleRow, StepPlan
from rootlace.wire.protocol import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


def random_tables(rows: int, context: int, block_size: int) -> np.ndarray:
    """Return blocks for `rows` sequences of `context` tokens, in random order."""
    width = -(-context // block_size)
    order = np.random.default_rng(0).permutation(rows * width)
    return order.astype(np.int32).reshape(rows, width)


def step_plan(
    tables: np.ndarray, block_size: int, known: np.ndarray, new: int, step: int = 0
) -> StepPlan:
    """Plan a sequence per row of `tables`: all have the tokens `known`, the last `new` of which are
    computed. From the second step on the last token is unknown: the previous step samples it.
    """
    rows, context, fed = len(tables), len(known), step > 0
    index = np.arange(rows, dtype=np.int32)
    positions = np.tile(np.arange(context - new, context), (rows, 1))
    slots = np.take_along_axis(tables, positions // block_size, 1).astype(np.int64) * block_size
    return StepPlan(
        step=step,
        token_ids=np.tile(known[context - new :], rows),
        positions=positions.ravel().astype(np.int32),
        slots=(slots + positions % block_size).ravel(),
        row_start=np.arange(rows + 1, dtype=np.int32) * new,
        context_len=np.full(rows, context, np.int32),
        block_tables=np.ascontiguousarray(tables[:, : -(-context // block_size)]),
        copies=np.empty((0, 3), np.int32),
        duplicate_tokens=np.empty(0, np.int32),
        duplicate_slots=np.empty(0, np.int64),
        samples=[
            SampleRow(row, GREEDY, known[: context - fed], context, source=row if fed else -1)
            for row in range(rows)
        ],
        feeds=np.stack((index, index), axis=1) if fed else np.empty((0, 2), np.int32),
    )


def random_tokens(count: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, count).astype(np.int32)


def decode_plans(
    rows: int, context: int, steps: int, block_size: int, vocab_size: int
) -> Iterator[StepPlan]:
    """Plan consecutive steps of rows that begin with `context` tokens of KV each."""
    tables = random_tables(rows, context + steps, block_size)
    known = random_tokens(context + steps, vocab_size)
    for step in range(steps):
        yield step_plan(tables, block_size, known[: context + step + 1], 1, step)
