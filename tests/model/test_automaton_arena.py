"""Automata and masks that come and go on the device, compared with the originals."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SteppedAutomaton
from rootlace.runtime.model.automaton_table import AutomatonArena, Runs
from tests.model.test_host_masks import Table

VOCAB = 70
WORDS = 3


def automaton(key: int) -> SteppedAutomaton:
    random = np.random.default_rng(key)
    states, classes, masks = (int(n) for n in random.integers(1, (20, 6, 8)))
    return SteppedAutomaton(
        key=key,
        token_class=random.integers(0, classes, VOCAB - key % 2).astype(np.int32),
        next_state=random.integers(-1, states, (states, classes)).astype(np.int32),
        mask_of=random.integers(0, masks, states).astype(np.int32),
        masks=random.integers(-(2**31), 2**31, (masks, WORDS)).astype(np.int32),
    )


def after(at: AutomatonState, token: int) -> int:
    classes = at.automaton.token_class
    if at.state < 0 or not 0 <= token < len(classes):
        return -1
    return int(at.automaton.next_state[at.state, classes[token]])


def words_of(at: AutomatonState) -> list[int]:
    automaton = at.automaton
    nothing = [0] * WORDS
    return automaton.masks[automaton.mask_of[at.state]].tolist() if at.state >= 0 else nothing


AUTOMATA = [automaton(key) for key in range(12)]
TABLES = [Table(key) for key in (3, 5)]
states = st.builds(
    lambda automaton, state: AutomatonState(automaton, state % (len(automaton.next_state) + 1) - 1),
    st.sampled_from(AUTOMATA),
    st.integers(0, 99),
)
private = st.integers(0, 999).map(
    lambda seed: np.random.default_rng(seed).integers(-9, 9, seed % 5).astype(np.int32)
)
shared = st.builds(MaskRow, st.sampled_from(TABLES), st.integers(0, 8))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([0, 3000, 20000, 1 << 20]),
    st.lists(st.lists(states | private | shared, min_size=1, max_size=8), min_size=1, max_size=8),
)
def test_any_sequence_of_steps(
    max_bytes: int, steps: list[list[AutomatonState | np.ndarray | MaskRow]]
) -> None:
    """The rows of each step find their automata with any memory."""
    arena = AutomatonArena(VOCAB, "cpu", max_bytes)
    rng = np.random.default_rng(0)
    for needs in steps:
        arena.begin_step()
        state = np.full(len(needs), -1, np.int32)
        rows = state.copy()
        for index, need in enumerate(needs):
            if isinstance(need, AutomatonState):
                state[index] = arena.state(need)
            else:
                rows[index] = arena.mask(need)
        arena.flush()
        tokens = rng.integers(-1, VOCAB - 1, 6).astype(np.int32)
        source = rng.integers(-1, 6, len(needs)).astype(np.int32)
        _, masks = REFERENCE.step_automata(
            *map(torch.from_numpy, (state, source, tokens, rows)), arena.tables
        )
        for index, need in enumerate(needs):
            words = arena.tables.masks[masks[index]].tolist()
            if isinstance(need, AutomatonState):
                at = need
                if source[index] >= 0:
                    at = AutomatonState(need.automaton, after(need, int(tokens[source[index]])))
                assert words == words_of(at)
            elif isinstance(need, MaskRow):
                assert words == need.table.rows[need.row].tolist()
            else:
                assert words == [*need.tolist(), *[0] * WORDS][:WORDS]


def test_what_is_there_is_not_sent_again() -> None:
    arena = AutomatonArena(VOCAB, "cpu", 1 << 20)
    where = arena.tables.masks.data_ptr()
    sizes = []
    for _ in range(3):
        arena.begin_step()
        arena.state(AutomatonState(AUTOMATA[0], 0))
        arena.mask(MaskRow(TABLES[0], 2))
        arena.flush()
        sizes.append(arena.uploaded_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0
    assert arena.generation == 0 and arena.tables.masks.data_ptr() == where


def test_what_was_used_longest_ago_makes_room() -> None:
    arena = AutomatonArena(VOCAB, "cpu", 0)  # room for one more mask than the one of the dead state
    table = TABLES[0]
    for row in (1, 2):
        arena.begin_step()
        arena.mask(MaskRow(table, row))
        arena.flush()
    assert arena.generation == 0
    before = arena.uploaded_bytes
    arena.begin_step()
    arena.mask(MaskRow(table, 2))
    arena.flush()
    assert arena.uploaded_bytes == before
    # One step needs more than there is room for: the tables move.
    arena.mask(MaskRow(table, 3))
    arena.flush()
    assert arena.generation == 1


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_runs_do_not_overlap_and_come_back(size: int, moves: list[tuple[int, bool]]) -> None:
    space = Runs(size)
    taken: list[tuple[int, int]] = []
    for count, give in moves:
        if give and taken:
            space.give(*taken.pop(count % len(taken)))
            continue
        start = space.take(count)
        if start is None:
            used = {i for first, n in taken for i in range(first, first + n)}
            gaps = "".join("x" if i in used else "." for i in range(size)).split("x")
            assert max(map(len, gaps)) < count
            continue
        taken.append((start, count))
        places = [i for first, n in taken for i in range(first, first + n)]
        assert len(places) == len(set(places)) and max(places) < size
    for run in taken:
        space.give(*run)
    assert space.take(size) == 0


def test_runs_grow() -> None:
    space = Runs(3)
    assert space.take(4) is None
    assert [space.take(1), space.take(1)] == [0, 1] and space.take(2) is None
    space.give(0, 1)
    assert {space.take(1), space.take(1)} == {0, 2} and space.take(1) is None
    space.grow(5)
    assert space.take(2) == 3 and space.take(1) is None
