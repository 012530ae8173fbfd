"""Decode rows that go from step to step, compared with the sequences' own state."""

import itertools
import random

import numpy as np
import pytest

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.scheduler.batch import DecodeRows
from tests.scheduler.world import World

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


class Kept:
    """A plan, and copies of all that its executor may look at."""

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self.plan = plan
        self.block_size = block_size
        names = ("token_ids", "positions", "slots", "row_start", "context_len")
        self.arrays = {name: getattr(plan, name).copy() for name in names}
        self.tables = [self._table(row) for row in range(plan.num_rows)]

    def _table(self, row: int) -> np.ndarray:
        used = -(-int(self.plan.context_len[row]) // self.block_size)
        return self.plan.block_tables[row, :used].copy()

    def expect_unchanged(self) -> None:
        for name, array in self.arrays.items():
            assert np.array_equal(getattr(self.plan, name), array), name
        for row, table in enumerate(self.tables):
            assert np.array_equal(self._table(row), table), f"table of row {row}"


@OVERLAP
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_plans_under_way_stay_as_they_are(overlap: bool, block_size: int) -> None:
    """Rows come and go while others decode; the executor's memory checks each plan by itself."""
    world = World(block_size=block_size, num_blocks=2400 // block_size, overlap=overlap)
    pick = random.Random(block_size)
    kept: list[Kept] = []
    for step in range(120):
        if step < 90 and pick.random() < 0.15:
            start = pick.choices(range(100), k=pick.randint(1, 30))
            world.submit(start, pick.randint(1, 40))
        plan = world.step()
        if plan is not None:
            kept.append(Kept(plan, block_size))
        for old in kept[-3:]:
            old.expect_unchanged()
    world.drain()
    world.expect_cold(*world.jobs.values())


@OVERLAP
def test_a_decode_step_touches_no_table(overlap: bool) -> None:
    """Long contexts: the tables are the step's before, and grow in place."""
    world = World(block_size=4, num_blocks=900, context_length=2000, overlap=overlap)
    for seed in range(3):
        world.submit(random.Random(seed).choices(range(100), k=500 + seed), 150)
    plans = [world.step() for _ in range(150)]
    decode = [p for p in plans if p is not None and p.num_rows == p.num_tokens == 3]
    assert len(decode) > 100
    same = sum(b.block_tables is a.block_tables for a, b in itertools.pairwise(decode))
    # Room for 32 blocks: of 149 steps one or two find none.
    assert len(decode) - 4 <= same < len(decode)
    world.drain()
    world.expect_cold(*world.jobs.values())


def test_rows_that_pause_come_back_with_their_own_tables() -> None:
    """Too few blocks: sequences are preempted and come back, others take their blocks."""
    world = World(block_size=4, num_blocks=24, max_running=6)
    for seed in range(6):
        world.submit(random.Random(seed).choices(range(100), k=9), 40)
    world.drain()
    assert world.stats["retractions"], "nobody was preempted: the test tests nothing"
    world.expect_cold(*world.jobs.values())


@OVERLAP
@pytest.mark.parametrize("block_size", [1, 4])
def test_rows_sharing_blocks_are_neighbours(overlap: bool, block_size: int) -> None:
    world = World(block_size=block_size, num_blocks=4000 // block_size, overlap=overlap)
    pick = random.Random(block_size)
    trunk = pick.choices(range(100), k=60)
    shared = 0
    for step in range(150):
        if step < 120 and pick.random() < 0.2:
            tail = pick.choices(range(100), k=pick.randint(1, 9))
            world.submit([*trunk[: pick.randint(1, 60)], *tail], pick.randint(1, 25))
        plan = world.step()
        if plan is None:
            continue
        starts = plan.positions[plan.row_start[:-1]] // block_size
        rows_of: dict[int, list[int]] = {}
        for row, start in enumerate(starts.tolist()):
            for block in plan.block_tables[row, :start].tolist():
                rows_of.setdefault(block, []).append(row)
        for rows in rows_of.values():
            assert rows == list(range(rows[0], rows[-1] + 1))
            shared += len(rows) - 1
    assert shared > 500
    world.drain()


@pytest.mark.parametrize("block_size", [1, 4])
def test_steps_in_which_nobody_decodes(block_size: int) -> None:
    rows, order = DecodeRows(block_size), []
    for _ in range(3 * block_size):
        layout = rows.lay_out([], order, version=1)
        assert not layout.sequences and not len(layout.positions)
