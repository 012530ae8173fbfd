"""A plan that another rank reads back has the numbers of the forward pass, and wants the same."""

import numpy as np
from msgspec.structs import replace

from rootlace.runtime.contracts.plan import PooledRow, StepPlan
from rootlace.runtime.model.decoder.interface import wanted_tokens
from rootlace.runtime.model.parallel.group import FIELDS, decode, encode
from tests.model.plans import Blocks, Row, Work, make_plan

SIZE = 4
ROWS = ("token_ids", "positions", "slots", "context_len", "block_tables", "adapters")


def plan() -> StepPlan:
    blocks = Blocks(64, SIZE)
    rows = [Row(blocks, [*range(3, 3 + count)]) for count in (5, 17, 9)]
    made = make_plan(
        [Work(rows[0]), Work(rows[1], 11, score_from=2), Work(rows[2])],
        copies=[(3, 9, 2), (4, 8, 1)],
        duplicates=[(1, 130), (2, 131)],
    )
    adapters = np.array([0, -1, 1], np.int32)
    return replace(made, pooled=[PooledRow(2, 3)], adapters=adapters)


def test_numbers_arrive_as_they_were() -> None:
    sent = plan()
    found = decode(encode(sent, SIZE))
    for name in FIELDS:
        assert getattr(found, name).dtype == getattr(sent, name).dtype
        if name != "block_tables":
            assert np.array_equal(getattr(found, name), getattr(sent, name)), name
    # 11 tokens of the longest row take three blocks of its table.
    assert np.array_equal(found.block_tables, sent.block_tables[:, :3])
    assert np.array_equal(wanted_tokens(found), wanted_tokens(sent))


def test_a_step_that_only_copies() -> None:
    sent = replace(plan(), **{name: getattr(plan(), name)[:0] for name in ROWS}, pooled=[])
    sent = replace(sent, samples=[], prompt_scores=[], row_start=np.zeros(1, np.int32))
    found = decode(encode(sent, SIZE))
    assert (found.num_tokens, found.num_rows, len(found.copies)) == (0, 0, 2)
