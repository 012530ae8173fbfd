"""Matchers on the automaton: what `interface.Matcher` promises, and the change to a fallback."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.scheduler.masks import StepMasks
from rootlace.runtime.structured.dfa_backend import AutomatonGrammar, DfaMatcher
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import TooLarge
from rootlace.runtime.structured.vocabulary import vocabulary
from rootlace.wire.errors import InvalidConstraint
from tests.structured.tiny_vocabulary import BytewiseTokenizer, TinyVocabulary, tiny_vocabulary

LETTERS = [character.encode() for character in 'abc01"{}:,é']
VOCABULARY = tiny_vocabulary(
    [*LETTERS, b"", b"ab", b"ab", b"aab", b'{"', b'":', b"\xc3", b"\xa9", b"\xa9a", b"01", b""], 2
)
IDS = {data: i for i, data in reversed(list(enumerate(VOCABULARY.token_bytes)))}
EOS, EOS2 = VOCABULARY.eos_token_ids
PADDING = IDS[b""]


def no_fallback() -> Grammar:
    raise AssertionError("the automaton is small")


def grammar(
    pattern: str, max_states: int = 1000, max_table_bytes: int = 1 << 20, fallback=no_fallback
) -> AutomatonGrammar:
    dfa = LazyDfa(parse(pattern), max_states)
    return AutomatonGrammar(
        VOCABULARY, dfa, BytewiseTokenizer(VOCABULARY), fallback, max_table_bytes
    )


def take(matcher: Matcher, *tokens: bytes) -> Matcher:
    for token in tokens:
        assert matcher.advance(IDS[token]), matcher.error()
    return matcher


def check_masks(matcher: Matcher) -> np.ndarray:
    """All ways to the mask agree, and with `advance` for every token; the mask."""
    allowed = matcher.allowed_mask()
    words = np.full(-(-VOCABULARY.size // 32), -1, np.int32)
    matcher.fill_bitmask(words)
    unpacked = np.unpackbits(words.view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(unpacked[: VOCABULARY.size], allowed)
    assert not unpacked[VOCABULARY.size :].any()
    place = matcher.mask_row()
    if place is not None:
        matcher.prepare_mask()
        assert place.table.filled(place.row)
        np.testing.assert_array_equal(place.table.rows[place.row], words)
    for token in range(VOCABULARY.size):
        assert matcher.advance(token) == allowed[token]
        if allowed[token]:
            matcher.rollback(1)
            assert matcher.error() == ""
        else:
            assert matcher.error()
    eos = [bool(allowed[token]) for token in VOCABULARY.eos_token_ids]
    assert eos == [matcher.is_accepting()] * 2
    return allowed


def test_a_walk_through_a_text() -> None:
    matcher = grammar(r'\{"a{1,2}":[01]+\}').matcher()
    assert not matcher.is_accepting() and not matcher.is_finished()
    assert matcher.forced_text() == b'{"a'
    assert matcher.forced_tokens() == [IDS[b"{"], IDS[b'"'], IDS[b"a"]]
    check_masks(matcher)
    take(matcher, b'{"', b"a")
    assert matcher.forced_text() == b"" and matcher.forced_tokens() == []
    check_masks(matcher)
    take(matcher, b'":', b"01", b"1")
    check_masks(matcher)
    take(matcher, b"}")
    assert matcher.is_accepting() and matcher.is_finished()
    assert np.flatnonzero(check_masks(matcher)).tolist() == [EOS, EOS2]
    assert matcher.advance(EOS)
    assert matcher.is_accepting() and matcher.is_finished()
    assert not check_after_end(matcher)
    matcher.rollback(2)
    assert not matcher.is_accepting()
    take(matcher, b"0", b"}")
    matcher.reset()
    assert matcher.forced_text() == b'{"a'
    with pytest.raises(ValueError, match="cannot undo 1 of 0"):
        matcher.rollback(1)
    with pytest.raises(ValueError, match="cannot undo"):
        matcher.rollback(-1)


def check_after_end(matcher: Matcher) -> bool:
    """Nothing is allowed any more; whether a token was taken in."""
    assert not matcher.allowed_mask().any()
    assert matcher.mask_row() is None
    matcher.prepare_mask()
    assert matcher.forced_text() == b"" and matcher.forced_tokens() == []
    return any(matcher.advance(token) for token in range(VOCABULARY.size))


def test_the_end_of_the_sequence_only_where_the_text_is_complete() -> None:
    matcher = grammar("(?:ab)*").matcher()
    assert matcher.is_accepting() and not matcher.is_finished()
    assert matcher.advance(EOS2)
    assert matcher.is_finished()
    matcher.rollback(1)
    take(matcher, b"a")
    assert not matcher.advance(EOS)
    assert "forbids token" in matcher.error() and "after 1 tokens" in matcher.error()
    take(matcher, b"b")
    assert matcher.error() == ""
    assert matcher.advance(EOS)


def test_only_the_empty_text() -> None:
    matcher = grammar("").matcher()
    assert matcher.is_accepting() and matcher.is_finished()
    assert np.flatnonzero(check_masks(matcher)).tolist() == [EOS, EOS2]


def test_no_text_at_all() -> None:
    matcher = grammar(r"a(?!.*)b").matcher()
    assert not matcher.is_accepting() and not matcher.is_finished()
    assert not check_masks(matcher).any()
    assert matcher.forced_text() == b"" and matcher.forced_tokens() == []


def test_tokens_that_are_no_text_and_ids_out_of_range() -> None:
    matcher = grammar("[^x]*").matcher()
    for token in (PADDING, -1, VOCABULARY.size, -VOCABULARY.size, 10**9):
        assert not matcher.advance(token)
    take(matcher, b"a", b"a")
    for token in (PADDING, -1, -3, VOCABULARY.size, 10**9):
        assert not matcher.advance(token)


def test_tokens_that_end_inside_a_character() -> None:
    matcher = grammar("[é]{2}").matcher()
    take(matcher, b"\xc3")
    assert matcher.forced_text() == b"\xa9\xc3\xa9"
    assert not matcher.advance(IDS[b"\xa9a"])
    take(matcher, b"\xa9", b"\xc3")
    check_masks(matcher)
    take(matcher, b"\xa9")
    assert matcher.is_finished()


def test_forced_tokens_are_asked_for_once_per_state_and_tail() -> None:
    made = grammar("[ab]*(?:c01c|01c)")
    tokenizer = made.canonicalizer
    assert isinstance(tokenizer, BytewiseTokenizer)
    for _ in range(3):
        matcher = take(made.matcher(), b"a", b"b", b"a", b"a", b"b", b"c")
        assert matcher.forced_tokens() == [IDS[b"0"], IDS[b"1"], IDS[b"c"]]
    assert tokenizer.asked == [(b"aabc", b"01c", True)]
    matcher.forced_tokens().clear()
    assert matcher.forced_tokens()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [r'(?:a{0,3}|\{"[ab]*":)*', r"[^a]{0,4}ab*", "(?:0|1[01]*)?", r"(?:é|ab|.c){2,5}"]
    ),
    st.lists(st.integers(0, VOCABULARY.size - 1) | st.integers(-3, -1), max_size=30),
)
def test_any_path_is_as_a_fresh_matcher_says(pattern: str, path: list[int]) -> None:
    """Steps, refusals and rollbacks; `re` decides what is complete."""
    shared = grammar(pattern)
    matcher = shared.matcher()
    taken: list[int] = []
    for token in path:
        if token < 0:
            count = min(-token, len(taken))
            matcher.rollback(count)
            del taken[len(taken) - count :]
        elif matcher.advance(token):
            taken.append(token)
        ended = bool(taken) and taken[-1] in VOCABULARY.eos_token_ids
        text = b"".join(VOCABULARY.token_bytes[t] for t in taken)
        try:
            complete = re.fullmatch(pattern, text.decode()) is not None
        except UnicodeDecodeError:
            complete = False
        assert matcher.is_accepting() == complete
        if ended:
            assert complete and not matcher.allowed_mask().any()
    fresh = grammar(pattern).matcher()
    assert all(fresh.advance(token) for token in taken)
    np.testing.assert_array_equal(fresh.allowed_mask(), matcher.allowed_mask())
    assert fresh.forced_text() == matcher.forced_text()
    assert fresh.is_finished() == matcher.is_finished()


def test_a_full_table() -> None:
    made = grammar("[ab]{0,30}c", max_table_bytes=4)  # one row of one word
    matcher = made.matcher()
    for count in range(20):
        assert (matcher.mask_row() is None) == (count > 0)
        matcher.prepare_mask()
        check_masks(matcher)
        take(matcher, b"a")


# ---------------------------------------------------------------- the fallback

EXPLOSIVE = "[ab]*a[ab]{9}"


class Fallback:
    """The same language with room; counts how often it is asked for."""

    def __init__(self, pattern: str = EXPLOSIVE) -> None:
        self.count = 0
        self.pattern = pattern

    def __call__(self) -> Grammar:
        self.count += 1
        return grammar(self.pattern, max_states=5000)


def test_the_fallback_takes_over_unnoticed() -> None:
    """Any question may come first when the automaton gets too large."""
    plain = grammar(EXPLOSIVE, max_states=5000).matcher()
    for ask in ("advance", "allowed_mask", "prepare_mask", "is_finished", "forced_text", "forced"):
        fallback = Fallback()
        made = grammar(EXPLOSIVE, max_states=12, fallback=fallback)
        matcher = made.matcher()
        plain.reset()
        text = [b"a", b"b", b"a", b"a", b"b", b"b", b"a", b"b", b"b", b"a", b"a", b"b", b"a"]
        for token in text:
            if ask == "forced_text":
                assert matcher.forced_text() == plain.forced_text()
            elif ask == "forced":
                assert matcher.forced_tokens() == plain.forced_tokens()
            elif ask == "is_finished":
                assert matcher.is_finished() == plain.is_finished()
            elif ask == "allowed_mask":
                np.testing.assert_array_equal(matcher.allowed_mask(), plain.allowed_mask())
            elif ask == "prepare_mask":
                place = matcher.mask_row()
                if place is not None:
                    matcher.prepare_mask()
                    assert place.table.filled(place.row)
                    words = place.table.rows[place.row].view(np.uint8)
                    found = np.unpackbits(words, bitorder="little")[: VOCABULARY.size]
                    np.testing.assert_array_equal(found, plain.allowed_mask())
            take(matcher, token)
            take(plain, token)
            assert matcher.is_accepting() == plain.is_accepting()
        assert fallback.count == 1
        np.testing.assert_array_equal(matcher.allowed_mask(), plain.allowed_mask())
        assert matcher.forced_text() == plain.forced_text()
        assert matcher.is_finished() == plain.is_finished()
        matcher.rollback(5)
        plain.rollback(5)
        np.testing.assert_array_equal(matcher.allowed_mask(), plain.allowed_mask())
        assert matcher.is_accepting() == plain.is_accepting()
        assert not matcher.advance(IDS[b"c"]) and matcher.error()
        matcher.reset()
        assert matcher.advance(IDS[b"a"]) and matcher.error() == ""
        # Later requests begin there.
        assert not isinstance(made.matcher(), DfaMatcher) or made.matcher()._grammar != made
        assert fallback.count == 1


def test_requests_on_the_way_change_over_when_they_must() -> None:
    fallback = Fallback()
    made = grammar(EXPLOSIVE, max_states=12, fallback=fallback)
    early = take(made.matcher(), b"b")
    late = made.matcher()
    for token in (b"a", b"b", b"a", b"a", b"b", b"b", b"a", b"b", b"b"):
        take(late, token)
    assert fallback.count == 1
    take(early, b"b", b"b")
    check_masks(early)
    assert fallback.count == 1


def test_no_fallback_fails_the_request_alone() -> None:
    def refuse() -> Grammar:
        raise InvalidConstraint("not there either")

    made = grammar(EXPLOSIVE, max_states=12, fallback=refuse)
    matcher = made.matcher()
    for _ in range(6):
        place = matcher.mask_row()
        assert place is not None
        matcher.prepare_mask()
        assert place.table.filled(place.row) == (not matcher.error())
        if matcher.error():
            break
        take(matcher, b"a", b"b")
    assert not matcher.allowed_mask().any()
    assert "not there either" in matcher.error()
    while matcher.advance(IDS[b"a"]) and matcher.advance(IDS[b"b"]):
        pass
    assert "not there either" in matcher.error()
    assert not matcher.is_finished()
    assert not matcher.allowed_mask().any()


def test_a_mask_that_fails_in_the_fallback_fails_one_request_alone() -> None:
    """The mask fails as if llguidance exceeded its bounds at one request; no other request inherits
    the failure."""

    class Failing:
        """Makes no mask, as long as there is something to fail with."""

        backend, nbytes = "failing", 0

        def matcher(self) -> Matcher:
            return Broken(grammar(EXPLOSIVE, max_states=5000)) if failures else sound.matcher()

    class Broken(DfaMatcher):
        def fill_bitmask(self, out: np.ndarray) -> None:
            out[:] = 0
            self._error = failures.pop() if failures else ""

    failures = ["the mask exceeds a bound"]
    sound = grammar(EXPLOSIVE, max_states=5000)
    made = grammar(EXPLOSIVE, max_states=12, fallback=Failing)
    first, second = made.matcher(), made.matcher()
    plain = sound.matcher()
    while failures:
        for matcher in (first, second, plain):
            take(matcher, b"a")
        first.prepare_mask()
    assert first.error() == "the mask exceeds a bound"
    place = second.mask_row()
    assert place is None or place.table.filled(place.row)  # it may not be filled in time
    second.prepare_mask()
    np.testing.assert_array_equal(second.allowed_mask(), plain.allowed_mask())
    assert second.allowed_mask().any()


def test_threads_on_one_grammar() -> None:
    """Some threads make masks while others step, as in the engine."""
    made = grammar(r"(?:[ab]{0,40}c|[01]{1,30}:)*")
    start = threading.Barrier(6)

    def work(seed: int) -> list[int]:
        random = np.random.default_rng(seed)
        matcher = made.matcher()
        start.wait()
        taken: list[int] = []
        for _ in range(300):
            place = matcher.mask_row()
            assert place is not None
            matcher.prepare_mask()
            words = place.table.rows[place.row].view(np.uint8)
            allowed = np.unpackbits(words, bitorder="little")[: VOCABULARY.size]
            allowed[[EOS, EOS2]] = 0
            token = int(random.choice(np.flatnonzero(allowed)))
            assert matcher.advance(token)
            taken.append(token)
        return taken

    with ThreadPoolExecutor(6) as pool:
        paths = [done.result() for done in [pool.submit(work, seed) for seed in range(6)]]
    for path in paths:
        matcher = grammar(r"(?:[ab]{0,40}c|[01]{1,30}:)*").matcher()
        assert all(matcher.advance(token) for token in path)


def test_too_large_is_an_invalid_constraint() -> None:
    """The exceptions of `fallback` include those of an automaton that is too large itself."""
    assert issubclass(TooLarge, InvalidConstraint)
    assert isinstance(VOCABULARY, TinyVocabulary)


def test_a_mask_that_fails_in_a_step_fails_one_request_alone() -> None:
    """Two requests at one place in one step, and the mask of the first exceeds a bound."""

    class Failing:
        backend, nbytes = "failing", 0

        def matcher(self) -> Matcher:
            return Broken(sound) if not made_any else sound.matcher()

    class Broken(DfaMatcher):
        def __init__(self, grammar: AutomatonGrammar) -> None:
            super().__init__(grammar)
            made_any.append(self)

        def fill_bitmask(self, out: np.ndarray) -> None:
            super().fill_bitmask(out)
            if len(self._tokens) == depth and not self._error:
                out[:] = 0
                self._error = "the mask exceeds a bound"

    sound = grammar(EXPLOSIVE, max_states=5000)
    shared = 0
    for depth in range(1, 12):
        made_any: list[Matcher] = []
        made = grammar(EXPLOSIVE, max_states=12, fallback=Failing)
        first, second, plain = made.matcher(), made.matcher(), sound.matcher()
        for _ in range(depth):
            for matcher in (first, second, plain):
                take(matcher, b"a")
        rows = [matcher.mask_row() for matcher in (first, second)]
        together = None not in rows and not rows[0].table.filled(rows[0].row)
        masks, wait = StepMasks(VOCABULARY.size).start([first, second])
        assert wait is None
        if not first.error():
            continue
        shared += together
        assert not np.asarray(masks[0]).any()
        assert not second.error()
        np.testing.assert_array_equal(
            vocabulary.unpacked(masks[1], VOCABULARY.size), plain.allowed_mask()
        )
    assert shared
