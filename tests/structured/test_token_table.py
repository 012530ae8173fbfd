"""Masks and token classes against `advance`, against enumerated languages, and against the bytes'
own steps on real vocabularies."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import TooLarge
from rootlace.runtime.structured.vocabulary.masks import TokenTable, token_classes
from rootlace.runtime.structured.vocabulary.vocabulary import ByteTrie, TokenOrder, Vocabulary

ALPHABET = "ab1é"
LETTERS = [character.encode() for character in ALPHABET]
# Every byte string up to two letters long, cut anywhere, some of them twice, with padding between.
WORDS = sorted({w[i:j] for w in map(b"".join, itertools.product(LETTERS, repeat=2))
                for i, j in itertools.combinations(range(len(w) + 1), 2)})  # fmt: skip
TOKENS = [*WORDS, b"", b"", *WORDS[::3], b"ab1ab1", b"x", b"\xff", b"aaaa", b"", b""]
EOS = (len(TOKENS) - 2, len(TOKENS) - 1)
TRIE = ByteTrie(TokenOrder(TOKENS), len(TOKENS))


def bits(words: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)


def make(pattern: str, max_bytes: int = 1 << 20) -> tuple[LazyDfa, TokenTable]:
    dfa = LazyDfa(parse(pattern), 4096)
    return dfa, TokenTable(TRIE, EOS, dfa, max_bytes)


def mask(table: TokenTable, state: int) -> np.ndarray:
    out = np.full(-(-len(TOKENS) // 32), -1, np.int32)
    table.write(state, out)
    assert not bits(out, 32 * len(out))[len(TOKENS) :].any()
    return bits(out, len(TOKENS))


# Patterns with a finite language, and that language.
finite = st.recursive(
    st.text(ALPHABET, max_size=3).map(lambda text: (text, frozenset([text]))),
    lambda inner: (
        st.tuples(inner, inner).map(
            lambda pair: (
                f"(?:{pair[0][0]})(?:{pair[1][0]})",
                frozenset(a + b for a in pair[0][1] for b in pair[1][1]),
            )
        )
        | st.tuples(inner, inner).map(
            lambda pair: (f"(?:{pair[0][0]}|{pair[1][0]})", pair[0][1] | pair[1][1])
        )
        | inner.map(lambda one: (f"(?:{one[0]})?", one[1] | {""}))
        | inner.map(
            lambda one: (
                f"(?:{one[0]}){{0,2}}",
                one[1] | {""} | frozenset(a + b for a in one[1] for b in one[1]),
            )
        )
    ).filter(lambda made: len(made[1]) <= 60),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(finite)
def test_masks_are_the_beginnings_of_the_texts(made: tuple[str, frozenset[str]]) -> None:
    pattern, language = made
    assert all(re.fullmatch(pattern, text) for text in language)
    texts = {text.encode() for text in language}
    prefixes = {text[:end] for text in texts for end in range(len(text) + 1)}
    dfa, table = make(pattern)
    classes = token_classes(TRIE, dfa, 1 << 20)
    assert classes is not None
    for prefix in sorted(prefixes)[:40]:
        state = dfa.run(dfa.start, prefix)
        found = mask(table, state)
        for token, data in enumerate(TOKENS):
            expected = prefix in texts if token in EOS else bool(data) and prefix + data in prefixes
            assert found[token] == expected, (prefix, token, data)
            after = dfa.run(state, data) if data else -1
            assert classes.next_state[state, classes.token_class[token]] == after


@settings(max_examples=40, deadline=None)
@given(finite, finite)
def test_infinite_languages_step_by_step(
    first: tuple[str, frozenset[str]], second: tuple[str, frozenset[str]]
) -> None:
    """Every state that can be reached, every token: as the bytes' steps say."""
    dfa, table = make(f"(?:{first[0]}|[^a]|.1)*(?:{second[0]})")
    state = 0
    while state < min(dfa.num_states, 60):
        found = mask(table, state)
        expected = [bool(data) and dfa.run(state, data) >= 0 for data in TOKENS]
        for token in EOS:
            expected[token] = dfa.accepting(state)
        assert found.tolist() == expected
        state += 1


def test_classes_are_the_coarsest() -> None:
    dfa = LazyDfa(parse("(?:ab|a1é)*[b1]{0,3}"), 4096)
    classes = token_classes(TRIE, dfa, 1 << 20)
    assert classes is not None
    assert classes.next_state.shape[0] == dfa.num_states
    functions = {classes.next_state[:, c].tobytes() for c in range(classes.next_state.shape[1])}
    assert len(functions) == classes.next_state.shape[1]
    assert set(classes.token_class.tolist()) | {0} == set(range(len(functions)))
    assert (classes.next_state[:, 0] == -1).all()


def test_classes_are_not_made_beyond_the_bounds() -> None:
    dfa = LazyDfa(parse("[ab1]{0,40}"), 4096)
    assert token_classes(TRIE, dfa, 200) is None
    assert token_classes(TRIE, dfa, 1 << 20) is not None


def test_rows_are_filled_when_asked_for_and_never_change() -> None:
    dfa, table = make("[ab]{0,30}1")
    states = [dfa.run(dfa.start, b"a" * n) for n in range(30)]
    places = [table.row(state) for state in states]
    assert [place.row for place in places if place] == list(range(30))
    assert not any(table.filled(i) for i in range(30))
    seen: dict[int, np.ndarray] = {}
    for state in [*states[::-2], *states]:
        table.fill(state)
        place = table.row(state)
        assert place is not None and table.filled(place.row)
        seen.setdefault(place.row, table.rows[place.row].copy())
        for row, words in seen.items():
            np.testing.assert_array_equal(table.rows[row], words)
    assert table.key != make("a")[1].key


def test_a_full_table_gives_no_more_rows_but_all_masks() -> None:
    row_bytes = 4 * -(-len(TOKENS) // 32)
    dfa, small = make("[ab]{0,30}1", max_bytes=3 * row_bytes)
    _, large = make("[ab]{0,30}1")
    states = [dfa.run(dfa.start, b"a" * n) for n in range(31)]
    for state in states:
        np.testing.assert_array_equal(mask(small, state), mask(large, state))
    assert [small.row(state) is None for state in states] == [False] * 3 + [True] * 28
    assert small.rows.nbytes == 3 * row_bytes


def test_too_large_changes_nothing() -> None:
    """A token of four letters meets more states than there may be."""
    dfa = LazyDfa(parse("[ab]*a[ab]{4}"), 8)
    table = TokenTable(TRIE, EOS, dfa, 1 << 20)
    for _ in range(2):
        with pytest.raises(TooLarge):
            table.fill(dfa.start)
    place = table.row(dfa.start)
    assert place is not None and not table.filled(place.row)
    table.store(place.row, np.full(-(-len(TOKENS) // 32), 7, np.int32))
    assert table.filled(place.row) and (table.rows[place.row] == 7).all()


def test_threads() -> None:
    """Eight threads want rows of one table, each in its own order; then everything is right."""
    dfa, table = make("(?:[ab]{0,60}1|[é1]{0,50}a)*")
    texts = [b"a" * n for n in range(60)] + ["é".encode() * n for n in range(50)]
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for index in np.random.default_rng(seed).permutation(len(texts)).tolist():
            state = dfa.run(dfa.start, texts[index])
            place = table.row(state)
            assert place is not None
            table.fill(state)
            assert table.filled(place.row)
            row = bits(table.rows[place.row], len(TOKENS))
            assert row[TOKENS.index(b"a")] == (dfa.run(state, b"a") >= 0)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result()
    rows = set()
    for text in texts:
        state = dfa.run(dfa.start, text)
        place = table.row(state)
        assert place is not None
        rows.add((state, place.row))
        expected = [bool(data) and dfa.run(state, data) >= 0 for data in TOKENS]
        for token in EOS:
            expected[token] = dfa.accepting(state)
        assert bits(table.rows[place.row], len(TOKENS)).tolist() == expected
    assert len(rows) == len({row for _, row in rows}) == len({state for state, _ in rows})


# ---------------------------------------------------------------- real vocabularies

STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
REAL = {
    r"\w+": ["", "x", "Ж"],
    STRING: ["", '"', '"\\', '"\\u0', '"é'],
    r".{0,40}": ["", "a" * 20, "é" * 38],
    r"\d{3}-\d{4}": ["", "12", "123-"],
    r"\{\"name\":\"[a-z ]+\",\"age\":[0-9]+\}": ["", '{"na', '{"name":"x y'],
    r"[가-힣]+|[一-龥]{1,4}": ["", "一"],
}


@cache
def vocabulary(folder: Path, name: str, size: int | None) -> Vocabulary:
    tokenizer = Tokenizer.from_file(str(folder / "data" / "tokenizers" / name / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    return Vocabulary.from_tokenizer(tokenizer, size, [eos])


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param("qwen3", 151936, marks=pytest.mark.slow), ("gpt2", None)]
)
@pytest.mark.parametrize("pattern", REAL)
def test_every_token_of_a_real_vocabulary(
    shared_dir: Path, name: str, size: int | None, pattern: str
) -> None:
    vocab = vocabulary(shared_dir, name, size)
    dfa = LazyDfa(parse(pattern), 16384)
    table = TokenTable(vocab.trie, vocab.eos_token_ids, dfa, 64 << 20)
    for text in REAL[pattern]:
        # Also in the middle of a character.
        for data in {text.encode(), (text + "é").encode()[:-1], (text + "한").encode()[:-1]}:
            state = dfa.run(dfa.start, data)
            if state < 0:
                continue
            out = np.empty(-(-vocab.size // 32), np.int32)
            table.write(state, out)
            run = dfa.run
            expected = [bool(token) and run(state, token) >= 0 for token in vocab.token_bytes]
            for token in vocab.eos_token_ids:
                expected[token] = dfa.accepting(state)
            np.testing.assert_array_equal(bits(out, vocab.size), expected)
            assert not bits(out, 32 * len(out))[vocab.size :].any()
    classes = token_classes(vocab.trie, dfa, 16 << 20)
    assert classes is not None
    for state in range(0, dfa.num_states, max(dfa.num_states // 8, 1)):
        place = table.row(state)
        assert place is not None
        table.fill(state)
        row = bits(table.rows[place.row], vocab.size)
        row[list(vocab.eos_token_ids)] = False
        by_class = classes.next_state[state] >= 0
        np.testing.assert_array_equal(by_class[classes.token_class], row)
