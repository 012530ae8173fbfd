"""Random patterns in the syntax of `re`, with texts that match or nearly match."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import strategies as st

from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa

CHARS = "abcABC01_- \n\tkKsSiIßſıİéÉσς٣²中😀\u212a\u2028\x85\U00010400\U00010428\u01c5\U0010ffff"
"""Few enough to collide often; cases without a partner, with two, and beyond the first plane."""

_ESCAPES = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"]


def _quoted(char: str) -> str:
    return "\\" + char if char in r".^$*+?{}[]\|()-&~# " + "\n\t" else char


_literals = st.sampled_from(CHARS).map(_quoted)
_members = st.one_of(
    _literals,
    st.sampled_from(_ESCAPES),
    st.tuples(st.sampled_from(CHARS), st.sampled_from(CHARS)).map(
        lambda pair: f"{_quoted(min(pair))}-{_quoted(max(pair))}"
    ),
)
_sets = st.builds(
    lambda negated, members: f"[{'^' * negated}{''.join(members)}]",
    st.booleans(),
    st.lists(_members, min_size=1, max_size=3),
)
_atoms = st.one_of(
    _literals,
    _literals,
    st.text("abk0", min_size=1, max_size=4),
    _sets,
    st.sampled_from([*_ESCAPES, "."]),
)
_quantifiers = st.sampled_from(
    ["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,3}", "{2,}", "{,2}?", "{0}", "{3,4}"]
)
_open = st.sampled_from(
    ["(", "(?:", "(?:", "(?i:", "(?s:", "(?-i:", "(?a:", "(?m:", "(?i-s:", "(?u:", "(?x: "]
)


def _extended(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds(lambda opening, body: f"{opening}{body})", _open, inner)
    return st.one_of(
        group,
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.builds(lambda atom, quantifier: atom + quantifier, _atoms, _quantifiers),
        st.builds(lambda body, quantifier: body + quantifier, group, _quantifiers),
    )


_flags = st.sampled_from(["", "", "", "(?i)", "(?s)", "(?a)", "(?ai)", "(?is)", "(?x)", "(?im)"])

regular = st.builds(str.__add__, _flags, st.recursive(_atoms, _extended, max_leaves=8))
"""Patterns without assertions."""

_assertions = st.one_of(
    st.builds(
        lambda opening, body: f"{opening}{body})",
        st.sampled_from(["(?=", "(?!"]),
        st.recursive(_atoms, _extended, max_leaves=3),
    ),
    st.sampled_from(
        [
            "$",
            r"\Z",
            "(?=$)",
            r"(?!\Z)",
            "[ab]*+",
            "a{1,2}+",
            "(?>ab)",
            "^",
            r"\A",
            r"\b",
            r"\B",
            "(?<=[ab])",
            "(?<!k)",
            r"(?<!\s)",
            "(?<=a|.)",
        ]
    ),
)


def _asserting(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        _extended(inner),
        st.tuples(_assertions, inner).map("".join),
        st.tuples(inner, _assertions).map("".join),
    )


asserting = st.builds(str.__add__, _flags, st.recursive(_atoms, _asserting, max_leaves=6))
"""Patterns with look-ahead, anchors and possessive quantifiers. Some are refused."""


def texts_near(dfa: LazyDfa, rng: random.Random, count: int) -> list[str]:
    """Texts of at most some ten characters: some in the language, some changed, some of no kin."""
    texts = ["", *("".join(rng.choices(CHARS, k=rng.randint(1, 4))) for _ in range(count // 3))]
    if dfa.empty:
        return texts
    for _ in range(count // 3):
        text = walk(dfa, rng).decode()
        texts.append(text)
        place = rng.randint(0, len(text))
        change = rng.randint(0, 3)
        char = rng.choice(CHARS)
        if change == 0:
            texts.append(text[:place] + text[place + 1 :])
        elif change == 1:
            texts.append(text[:place] + char + text[place:])
        elif change == 2:
            texts.append(text[:place] + char + text[place + 1 :])
        else:
            texts.append(text.swapcase())
    return [text for text in texts if len(text) <= 14]


def walk(dfa: LazyDfa, rng: random.Random) -> bytes:
    """The bytes of some accepted text: at random for a while, then the shortest way to an end."""
    state, read = dfa.start, bytearray()
    for _ in range(rng.randint(0, 10)):
        row = [dfa.step(state, byte) for byte in range(256)]
        # Many bytes lead to few states: the ways out are drawn, not the bytes.
        ways = sorted(set(row) - {DEAD})
        if not ways:
            break
        state = rng.choice(ways)
        read.append(rng.choice([byte for byte in range(256) if row[byte] == state]))
    return bytes(read) + shortest_end(dfa, state)


def shortest_end(dfa: LazyDfa, state: int) -> bytes:
    """The shortest bytes from `state` to acceptance. Fails if there are none: a dead end."""
    before: dict[int, tuple[int, int]] = {state: (DEAD, 0)}
    queue = deque([state])
    while queue:
        current = queue.popleft()
        if dfa.accepting(current):
            read = bytearray()
            while current != state:
                current, byte = before[current]
                read.append(byte)
            return bytes(reversed(read))
        for byte in range(256):
            after = dfa.step(current, byte)
            if after != DEAD and after not in before:
                before[after] = (current, byte)
                queue.append(after)
    raise AssertionError(f"state {state} cannot reach the end of a text")
