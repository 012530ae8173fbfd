"""The lazy automaton: chains, classes, bounds, no dead ends, threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    Regex,
    Repeat,
    TooLarge,
)
from rootlace.wire.errors import InvalidConstraint
from tests.structured.regex import patterns

MAX_STATES = 16384


def dfa_of(pattern: str, max_states: int = MAX_STATES) -> LazyDfa:
    return LazyDfa(parse(pattern), max_states)


def some_states(dfa: LazyDfa, rng: random.Random) -> list[int]:
    """States along some random walks."""
    found = {dfa.start}
    for _ in range(5):
        state = dfa.start
        for byte in patterns.walk(dfa, rng):
            state = dfa.step(state, byte)
            found.add(state)
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(patterns.asserting | patterns.regular, st.integers(0, 2**32))
def test_states_classes_and_chains_of_random_patterns(pattern: str, seed: int) -> None:
    try:
        dfa = dfa_of(pattern)
    except InvalidConstraint:
        return
    if dfa.empty:
        assert dfa.start == DEAD
        return
    classes = dfa.byte_classes
    assert classes.dtype == np.uint8
    assert classes[0] == 0 and classes[255] == classes.max()
    for state in some_states(dfa, random.Random(seed)):
        patterns.shortest_end(dfa, state)  # fails at a dead end
        row = dfa.transitions(np.array([state]))[0]
        assert row.tolist() == [dfa.step(state, byte) for byte in range(256)]
        for number in range(classes[255] + 1):
            assert len(set(row[classes == number].tolist())) == 1
        # The chain, one byte at a time.
        expected, current = bytearray(), state
        while not dfa.accepting(current):
            ways = [byte for byte in range(256) if dfa.step(current, byte) != DEAD]
            assert ways
            if len(ways) > 1:
                break
            expected.append(ways[0])
            current = dfa.step(current, ways[0])
        assert dfa.forced(state) == (bytes(expected), current)
        assert dfa.forced(state) == (bytes(expected), current)


def test_chains_are_remembered_where_they_join() -> None:
    dfa = dfa_of("(?:x|yy)abcdef[12]")
    start = dfa.start
    tail, end = dfa.forced(dfa.run(start, b"xabc"))
    assert tail == b"def"
    assert dfa.forced(dfa.run(start, b"y")) == (b"yabcdef", end)
    assert dfa.forced(dfa.run(start, b"x")) == (b"abcdef", end)
    assert dfa.forced(end) == (b"", end)
    assert dfa.forced(dfa.run(end, b"1")) == (b"", dfa.run(end, b"1"))


def test_a_chain_stops_where_the_text_may_end() -> None:
    dfa = dfa_of("ab(cd)?")
    assert dfa.forced(dfa.start) == (b"ab", dfa.run(dfa.start, b"ab"))
    assert dfa.forced(dfa.run(dfa.start, b"abc"))[0] == b"d"


def test_the_dead_state_stays_dead() -> None:
    dfa = dfa_of("a")
    assert dfa.step(DEAD, 97) == DEAD
    assert dfa.run(dfa.start, b"ba") == DEAD
    assert not dfa.accepting(DEAD)
    assert dfa.forced(DEAD) == (b"", DEAD)


@pytest.mark.parametrize(
    "regex",
    [
        syntax.either(),
        syntax.chars(()),
        syntax.concat(Literal("a"), syntax.chars(())),
        syntax.repeat(syntax.NOTHING, 1, 2),
        Concat((Look(Literal("a"), negative=False), Literal("b"))),
    ],
)
def test_the_empty_language(regex: Regex) -> None:
    dfa = LazyDfa(regex, 10)
    assert dfa.empty
    assert dfa.run(dfa.start, b"a") == DEAD


@pytest.mark.parametrize(
    "regex",
    [
        Literal(""),
        syntax.repeat(syntax.NOTHING, 0, 2),
        syntax.repeat(Literal("a"), 0, 0),
        syntax.either(Literal(""), syntax.concat(Literal("a"), syntax.NOTHING)),
    ],
)
def test_the_empty_text_only(regex: Regex) -> None:
    dfa = LazyDfa(regex, 10)
    assert dfa.accepting(dfa.start)
    assert (dfa.transitions(np.array([dfa.start])) == DEAD).all()


@pytest.mark.parametrize(
    "regex",
    [
        Repeat(Chars(((97, 98),)), 1, 100_000),
        Repeat(Repeat(Repeat(Literal("ab"), 1, 1000), 1, 1000), 1, 1000),
        Repeat(Chars(((97, 98),)), 2**31, None),
        Literal("a" * 20_000),
        Repeat(Repeat(Literal("ab"), 10_000, 10_000), 10_000, 10_000),
        Concat((Look(Literal("a"), negative=True), Repeat(Chars(((97, 98),)), 1, 100_000))),
    ],
)
def test_too_large_is_known_before_anything_is_visited(regex: Regex) -> None:
    with pytest.raises(TooLarge):
        LazyDfa(regex, MAX_STATES)


def test_states_of_many_items_are_few() -> None:
    """One mask may visit all of these states."""
    dfa = dfa_of("[ab]*a[ab]{1000}c")
    with pytest.raises(TooLarge):
        dfa.run(dfa.start, b"a" * 1000)


def test_too_many_followers_are_too_large() -> None:
    maybe = Concat((Repeat(Literal("a"), 0, 1), Repeat(Literal("b"), 0, 1)))
    with pytest.raises(TooLarge):
        dfa = LazyDfa(Repeat(maybe, 0, 450), MAX_STATES)
        dfa.run(dfa.start, b"ab" * 450)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:){1000000000}a",
        "(?:(?:)*){1000000000}a",
        "(?:(?:|){9999}){1000000000}a",
        "(?:){1000000000}(?=a)a",
        "(?:){0}a",
    ],
)
def test_any_number_of_nothing_is_nothing(pattern: str) -> None:
    dfa = dfa_of(pattern)
    assert dfa.forced(dfa.start)[0] == b"a"


def test_any_number_of_nothing_in_trees() -> None:
    for nothing in (
        Literal(""),
        Concat(()),
        Either((Literal(""), Literal(""))),
        Repeat(Literal(""), 0, None),
    ):
        tree = Concat((Repeat(nothing, 10**9, 2 * 10**9), Literal("a")))
        dfa = LazyDfa(tree, 100)
        assert dfa.forced(dfa.start)[0] == b"a"


def test_copies_of_many_texts_share_their_trie() -> None:
    texts = Either(tuple(Literal(f"{number},") for number in range(50_000)))
    dfa = LazyDfa(Repeat(texts, 1, 5000), MAX_STATES)
    assert dfa.accepting(dfa.run(dfa.start, b"49999,0,123,"))
    assert not dfa.accepting(dfa.run(dfa.start, b"49999,0,123"))
    assert dfa.run(dfa.start, b"50000") == DEAD


def test_parts_that_are_shared_exponentially_often_are_too_large() -> None:
    regex: Regex = Literal("a")
    for _ in range(200):
        regex = Either((Concat((regex, regex)), regex))
    with pytest.raises(TooLarge):
        LazyDfa(regex, MAX_STATES)


def test_sizes_beyond_any_bound_are_too_large() -> None:
    regex: Regex = Literal("ab")
    for _ in range(150):
        regex = Repeat(Repeat(regex, 10**18, 10**18), 1, 10**18)
    with pytest.raises(TooLarge, match="positions"):
        LazyDfa(regex, MAX_STATES)
    with pytest.raises(TooLarge, match="bytes"):
        LazyDfa(Literal("a" * 20_000), MAX_STATES)


def test_an_exponential_automaton_stops_at_its_bound() -> None:
    dfa = dfa_of("(a|b)*a(a|b){20}", max_states=500)
    rng = random.Random(1)
    with pytest.raises(TooLarge):
        for _ in range(1000):
            dfa.run(dfa.start, bytes(rng.choices(b"ab", k=40)))
    assert dfa.num_states <= 500
    assert dfa.run(dfa.start, b"ba") != DEAD  # what is known stays usable
    assert dfa.nbytes < 5_000_000


def test_too_deep_trees_are_too_large() -> None:
    regex: Regex = Literal("a")
    for _ in range(100_000):
        regex = Repeat(Concat((regex, Literal("b"))), 0, 1)
    for tree in (regex, Concat((Look(Literal("x"), negative=True), regex))):
        with pytest.raises(TooLarge):
            LazyDfa(tree, 10**6)


def test_choices_are_a_trie_of_which_little_is_made() -> None:
    texts = [f"{number * 7919 % 1_000_003}é" for number in range(65_536)] + ["", "12", "1"]
    dfa = LazyDfa(
        Concat((Literal("<"), Either(tuple(map(Literal, texts))), Literal(">"))), MAX_STATES
    )
    known = set(texts)
    rng = random.Random(0)
    for text in [*rng.sample(texts, 50), "", "1", "12", "1é", *map(str, range(50))]:
        state = dfa.run(dfa.start, f"<{text}>".encode())
        assert dfa.accepting(state) == (text in known)
    assert dfa.num_states < 2000


def test_common_choices_force_their_common_beginning() -> None:
    dfa = LazyDfa(Either((Literal("red apple"), Literal("red ant"), Literal("red"))), 100)
    assert dfa.forced(dfa.start)[0] == b"red"
    assert dfa.forced(dfa.run(dfa.start, b"red "))[0] == b"a"


def test_threads_see_one_automaton() -> None:
    pattern = r"(\w{1,8}|[^\d]{2,6}é)*x{2,9}"
    expected = dfa_of(pattern)
    shared = dfa_of(pattern)

    def work(seed: int) -> list[bool]:
        rng = random.Random(seed)
        results = []
        for _ in range(60):
            text = "".join(rng.choices("axé 9中", k=rng.randint(0, 9))) + "xx"
            results.append(shared.accepting(shared.run(shared.start, text.encode())))
            results.append(
                results[-1] == expected.accepting(expected.run(expected.start, text.encode()))
            )
        return results[1::2]

    with ThreadPoolExecutor(8) as pool:
        for agreed in pool.map(work, range(16)):
            assert all(agreed)
    rows = shared.transitions(np.arange(shared.num_states))
    assert rows.dtype == np.int32 and rows.max() < shared.num_states
