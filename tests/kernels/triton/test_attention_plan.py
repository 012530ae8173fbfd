"""Plan of decode attention, read back as the kernels read it: the reads of each row, and their
results."""

from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.triton.attention_plan import (
    FIELDS,
    HEADER,
    DecodePlan,
    SharingRule,
    SplitRule,
    items_at,
    plan_decode,
    split_lengths,
    split_rule,
)

EAGER = SharingRule(node_bytes=0, step_bytes=0, least_segment=16, programs=16, unit=8)
"""Shares whatever saves a position."""
NEVER = SharingRule(step_bytes=1 << 60)
SPLIT = SplitRule(least=8, most=4)
HEADS, KV_HEADS, DIM, TILE = 6, 2, 16, 8


def max_numbers(rows: int, blocks_per_row: int, rule: SplitRule) -> int:
    """Return the longest `DecodePlan.numbers` of a family, for rows of at most `blocks_per_row`
    blocks."""
    items = rows * (rule.slots_per_row + 1)
    shared = rows * rule.slots_per_row  # a shared item has a partial result of its own at least
    return items_at(rows) + FIELDS * (items + shared) + rows * (blocks_per_row + rule.slots_per_row)


GROUP = HEADS // KV_HEADS


def make_batch(tables: np.ndarray, context: list[int], size: int) -> AttentionBatch:
    return AttentionBatch(
        row_start=np.arange(len(context) + 1, dtype=np.int32),
        context_len=np.array(context, np.int32),
        block_tables=tables,
        block_size=size,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def random_tree(random: np.random.Generator, size: int) -> AttentionBatch:
    """Rows in depth-first order of a random tree; behind a row's last block there is garbage."""
    tables: list[list[int]] = []
    free = iter(random.permutation(100_000).tolist())

    def grow(prefix: list[int], depth: int) -> None:
        prefix = prefix + [next(free) for _ in range(int(random.integers(0, 6)))]
        if depth == 0 or random.random() < 0.3:
            tables.append([*prefix, next(free)])
            return
        for _ in range(int(random.integers(1, 4))):
            grow(prefix, depth - 1)

    grow([], int(random.integers(0, 5)))
    width = max(map(len, tables)) + 2
    padded = np.array([row + [-9] * (width - len(row)) for row in tables], np.int32)
    context = [len(row) * size - int(random.integers(0, size)) for row in tables]
    return make_batch(padded, context, size)


@dataclass
class Read:
    """Positions `first : last` of a row, whose result is put into `slot` (-1: into the output)."""

    first: int
    last: int
    slot: int


def read_back(plan: DecodePlan, batch: AttentionBatch) -> list[list[Read]]:
    """Return the reads of each row of the batch. Checks that the blocks are those of its table."""
    numbers = plan.numbers.tolist()
    own, shared, shared_at = numbers[:3]
    starts = numbers[HEADER : HEADER + plan.rows + 1]
    tokens = numbers[HEADER + plan.rows + 1 : HEADER + 2 * plan.rows + 1]
    reads: list[list[Read]] = [[] for _ in range(plan.rows)]

    def check_blocks(row: int, at: int, first: int, last: int) -> None:
        for position in range(first, last):
            block = position // batch.block_size
            assert numbers[at + block] == batch.block_tables[row, block]

    for item in range(own):
        at = plan.items_at + item * FIELDS
        token, table, first, last, slot = numbers[at : at + 5]
        row = tokens.index(token)
        check_blocks(row, table, first, last)
        reads[row].append(Read(first, last, slot))
    pairs_done = set()
    for item in range(shared):
        at = shared_at + item * FIELDS
        begin, pair, pairs, table, first, last, ordinal, _ = numbers[at : at + FIELDS]
        for index in range(pair, min(pair + TILE, pairs)):
            row, slot = begin + index // GROUP, starts[begin + index // GROUP] + ordinal
            assert (slot, index % GROUP) not in pairs_done
            pairs_done.add((slot, index % GROUP))
            if index % GROUP == 0:
                check_blocks(row, table, first, last)
                reads[row].append(Read(first, last, slot))
    assert len(pairs_done) % GROUP == 0
    return reads


def check(plan: DecodePlan, batch: AttentionBatch, window: int | None) -> None:
    """Check that every row reads each visible position once, in order of its partial results."""
    starts = plan.numbers[HEADER : HEADER + plan.rows + 1].tolist()
    firsts = plan.numbers[HEADER + 2 * plan.rows + 1 : HEADER + 3 * plan.rows + 1].tolist()
    assert starts[-1] <= plan.slots
    for row, reads in enumerate(read_back(plan, batch)):
        if row >= len(batch.context_len):
            assert not reads and starts[row] == starts[row + 1]
            continue
        context = int(batch.context_len[row])
        first = 0 if window is None else max(context - window, 0)
        assert firsts[row] == first
        if len(reads) == 1:
            assert reads[0].slot == -1 and starts[row] == starts[row + 1]
        else:
            reads.sort(key=lambda read: read.slot)
            assert [read.slot for read in reads] == list(range(starts[row], starts[row + 1]))
        assert reads[0].first <= first and reads[-1].last == context
        for before, after in pairwise(reads):
            assert before.last <= after.first <= max(before.last, first)
        assert all(read.first < read.last for read in reads)


@pytest.mark.parametrize("window", [None, 1, 13, 40])
def test_every_row_reads_what_it_sees_once(window: int | None) -> None:
    random = np.random.default_rng(window)
    shared = 0
    for trial in range(90):
        batch = random_tree(random, int(random.choice([1, 4, 16])))
        count = len(batch.context_len)
        rows = None if trial % 3 else count + int(random.integers(0, 4))
        sharing = EAGER if trial % 5 else NEVER
        plan = plan_decode(batch, window, rows, SPLIT, sharing, TILE)
        check(plan, batch, window)
        shared += int(plan.numbers[1])
    assert shared > 30 or window in (1, 13)  # short windows see little of what is shared


def test_a_row_is_cut_alike_whoever_is_beside_it() -> None:
    random = np.random.default_rng(3)
    for window in (None, 50):
        batch = random_tree(random, 4)
        while len(batch.context_len) < 4:
            batch = random_tree(random, 4)
        together = read_back(plan_decode(batch, window, None, SPLIT, NEVER, TILE), batch)
        for row, context in enumerate(batch.context_len):
            alone = make_batch(batch.block_tables[row : row + 1], [int(context)], 4)
            (reads,) = read_back(plan_decode(alone, window, 1, SPLIT, NEVER, TILE), alone)
            cuts = [(read.first, read.last) for read in reads]
            assert [(read.first, read.last) for read in together[row]] == cuts


def test_parts_begin_at_multiples_of_a_power_of_two_and_are_few() -> None:
    span = np.concatenate((np.arange(1, 300), 2 ** np.arange(9, 24), 2 ** np.arange(9, 24) + 1))
    lengths = split_lengths(span, SplitRule(8, 4))
    assert (-(-span // lengths) <= 4).all()
    assert (np.log2(lengths // 8) % 1 == 0).all()
    assert ((lengths == 8) | (-(-span // (lengths // 2)) > 4)).all()  # no longer than needed


def test_launches_of_a_family_are_alike() -> None:
    """Contents and the length of the one array differ, and nothing else."""
    random = np.random.default_rng(5)
    rows = 32
    plans = [
        plan_decode(make_batch(np.zeros((0, 0), np.int32), [], 4), None, rows, SPLIT, EAGER, 8)
    ]
    while len(plans) < 20:
        batch = random_tree(random, 4)
        if len(batch.context_len) <= rows:
            plans.append(plan_decode(batch, None, rows, SPLIT, EAGER, TILE))
            slots, blocks = rows * SPLIT.slots_per_row, batch.block_tables.shape[1]
            # A shared item has a partial result of its own at least.
            longest = items_at(rows) + FIELDS * (rows + 2 * slots) + rows * blocks + slots
            assert len(plans[-1].numbers) <= longest
    assert {(plan.rows, plan.slots, plan.shares, plan.items_at) for plan in plans} == {
        (rows, rows * SPLIT.slots_per_row, True, items_at(rows))
    }
    empty = plans[0].numbers
    assert empty[:2].tolist() == [0, 0] and len(empty) == items_at(rows)
    assert (empty[HEADER + rows + 1 : HEADER + 2 * rows + 1] == -1).all()
    alone = [plan_decode(make_batch(np.array([[3]]), [4], 4), None, 1, SPLIT, EAGER, TILE)]
    assert not alone[0].shares  # a lone row never launches the kernel for shared nodes


def test_partial_results_have_room_whatever_the_tree() -> None:
    """A chain in which every row leaves its neighbours one block later: as many levels as rows."""
    rows, size = 24, 4
    tables = np.arange(rows * 40, dtype=np.int32).reshape(rows, 40)
    for row in range(rows):
        tables[row:, : 1 + row] = tables[row, : 1 + row]
    batch = make_batch(tables, [150] * rows, size)
    for most in (1, 2, 4, 16):
        split = SplitRule(least=8, most=most)
        for rule in (EAGER, SharingRule(0, 0, 16, 1000, 8)):
            plan = plan_decode(batch, None, rows, split, rule, TILE)
            assert plan.numbers[1] > 0
            check(plan, batch, None)


def test_only_what_saves_enough_is_shared() -> None:
    """64 rows under 512 positions, 128 bytes each: 63 x 512 x 128 bytes are saved, but for partial
    results of 6 positions' worth."""
    tables = np.arange(64 * 20, dtype=np.int32).reshape(64, 20)
    tables[:, :16] = tables[0, :16]
    batch = make_batch(tables, [530] * 64, 32)
    saved = (63 * 512 - 64 * 6) * 128
    for node, step, found in ((saved, 0, 1), (saved + 1, 0, 0), (0, saved, 1), (0, saved + 1, 0)):
        rule = SharingRule(node_bytes=node, step_bytes=step, least_segment=512)
        plan = plan_decode(batch, None, None, SplitRule(128, 16), rule, 128)
        assert plan.numbers[1] == found * (64 * GROUP // 128 + 1)
        assert plan.shares == bool(found)


def test_segments_are_as_many_as_programs() -> None:
    """One node has two tiles and two KV heads, so a segment's share is a quarter of the
    programs."""
    tables = np.arange(64 * 300, dtype=np.int32).reshape(64, 300)
    tables[:, :256] = tables[0, :256]
    batch = make_batch(tables, [256 * 32 + 3] * 64, 32)
    rule = SharingRule(0, 0, least_segment=256, programs=64, unit=128)
    plan = plan_decode(batch, None, None, SplitRule(128, 128), rule, 96)
    assert plan.numbers[1] * KV_HEADS == 64
    rule = SharingRule(0, 0, least_segment=1024, programs=64, unit=128)
    assert plan_decode(batch, None, None, SplitRule(128, 128), rule, 96).numbers[1] == 2 * 8


def test_rows_that_are_no_family_are_refused() -> None:
    batch = make_batch(np.zeros((2, 4), np.int32), [5, 9], 4)
    with pytest.raises(ValueError, match="1 rows"):
        plan_decode(batch, None, 1, SPLIT, EAGER, TILE)
    several = AttentionBatch(**{**msgspec.structs.asdict(batch), "row_start": np.array([0, 2, 3])})
    with pytest.raises(ValueError, match="one new token"):
        plan_decode(several, None, 2, SPLIT, EAGER, TILE)
    with pytest.raises(ValueError, match="context"):
        plan_decode(make_batch(np.zeros((1, 4), np.int32), [0], 4), None, 1, SPLIT, EAGER, TILE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "expected"),
    [
        (32, 8, 128, SplitRule(256, 16)),
        (32, 8, 64, SplitRule(256, 16)),
        (64, 8, 128, SplitRule(256, 16)),
        (32, 32, 128, SplitRule(128, 8)),
        (12, 2, 128, SplitRule(256, 64)),
        (8, 1, 256, SplitRule(256, 128)),
    ],
)
def test_split_of_models_in_use(heads: int, kv_heads: int, dim: int, expected: SplitRule) -> None:
    assert split_rule(heads, kv_heads, dim, 2) == expected
