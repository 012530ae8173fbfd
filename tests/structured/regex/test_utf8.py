"""Characters as bytes, against Python's own encoder."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.structured.regex.syntax import (
    ALL,
    DONE,
    CharAutomaton,
    Ranges,
    category,
    union,
)

EDGES = [0, 0x7F, 0x80, 0xBF, 0xC0, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF,
         0x10000, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FFFF]  # fmt: skip
codes = st.one_of(st.sampled_from(EDGES), st.integers(0, 0x10FFFF), st.integers(0, 0x900)).filter(
    lambda code: not 0xD800 <= code < 0xE000
)


def language(automaton: CharAutomaton) -> list[bytes]:
    """All that the automaton reads, ascending."""
    found = []

    def visit(state: int, read: bytes) -> None:
        for low, high, after in automaton.edges[state]:
            for byte in range(low, high + 1):
                if after == DONE:
                    found.append(read + bytes([byte]))
                else:
                    visit(after, read + bytes([byte]))

    visit(0, b"")
    return found


def encoded(ranges: Ranges) -> list[bytes]:
    return [chr(code).encode() for first, last in ranges for code in range(first, last + 1)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(codes, st.integers(0, 5000)), min_size=1, max_size=6))
def test_automata_read_the_utf8_form_of_exactly_their_characters(
    spans: list[tuple[int, int]],
) -> None:
    ranges = union((first, min(first + more, 0x10FFFF)) for first, more in spans)
    automaton = CharAutomaton(ranges)
    assert language(automaton) == encoded(ranges)
    for edges in automaton.edges:
        assert edges
        for before, after in itertools.pairwise(edges):
            assert before[1] < after[0]


def test_all_of_unicode_is_few_states() -> None:
    assert len(CharAutomaton(ALL).edges) <= 8
    words = category(r"\w", ascii_only=False)
    automaton = CharAutomaton(words)
    assert len(automaton.edges) < 400
    assert language(automaton) == encoded(words)
