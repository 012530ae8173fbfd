"""What matchers remember of automata: steps taken at once, masks that are there."""

import gc
import weakref

import numpy as np
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler, Matcher, dfa_backend
from rootlace.runtime.structured.dfa_backend import DfaState, DfaStates
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary

REGEX = r"(?:ab|ac)+d[0-9]{2}"
SCHEMA = {"type": "object", "properties": {"ab": {"type": "integer", "maximum": 99}}}
TEXTS = {"regex": b"abacd07", "open": b'{"ab":12}'}


@pytest.fixture(scope="module")
def compiler(demo_model) -> GrammarCompiler:
    tokenizer = (demo_model / "tokenizer.json").read_text("utf-8")
    return GrammarCompiler(Vocabulary(tokenizer, 4096, [2]))


def made(compiler: GrammarCompiler, kind: str) -> Matcher:
    if kind == "regex":
        return compiler.compile(regex=REGEX).matcher()
    return compiler.compile(json_schema=SCHEMA).matcher()


@pytest.mark.parametrize("kind", TEXTS)
def test_a_known_way_is_gone_at_once(compiler: GrammarCompiler, kind: str) -> None:
    tokens = [compiler.vocabulary.byte_tokens[byte] for byte in TEXTS[kind]]
    first, other = made(compiler, kind), made(compiler, kind)
    for token in tokens:
        assert first.allowed_mask()[token] and first.advance(token)
        first.prepare_mask()
        first.mask_row()  # is filled now, and so it is known
    known = 0
    for count, token in enumerate(tokens):
        expected = other.mask_row()
        assert other.place.mask is None or other.place.mask is expected
        last = count + 1 == len(tokens)
        place = other.place
        there = isinstance(place, DfaState) and token in place.after
        assert other.advance(token)
        if kind == "open":  # what is known ends where the automaton does
            known += there
            continue
        assert there
        assert other.place.unfinished is not last, "it may be the end"
        if not last:
            row = other.place.mask
            assert row is not None and row.table.filled(row.row)
            mask = np.unpackbits(row.table.rows[row.row].view(np.uint8), bitorder="little")
            np.testing.assert_array_equal(mask[:4096].astype(bool), other.allowed_mask())
    assert known > 1 or kind != "open"
    assert other.is_finished()
    other.rollback(len(tokens))
    again = made(compiler, kind)
    np.testing.assert_array_equal(other.allowed_mask(), again.allowed_mask())
    assert not other.is_accepting()


@pytest.mark.parametrize("kind", TEXTS)
def test_a_grammar_that_nobody_has_leaves_nothing(compiler: GrammarCompiler, kind: str) -> None:
    """Not even until a full collection of garbage, which is rare: by then there are hundreds."""
    source = {"regex": REGEX} if kind == "regex" else {"json_schema": SCHEMA}
    other = GrammarCompiler(compiler.vocabulary)
    matcher = other.compile(**source).matcher()  # type: ignore[arg-type]
    for _ in range(2):
        for byte in TEXTS[kind]:
            token = compiler.vocabulary.byte_tokens[byte]
            assert matcher.allowed_mask()[token] and matcher.advance(token)
            matcher.prepare_mask()
            row = matcher.mask_row()
        matcher.reset()
    assert row is not None
    table, words = row.table, row.table.rows[row.row].copy()
    automaton = weakref.ref(table._dfa)  # type: ignore[attr-defined]
    gc.disable()
    try:
        del matcher, other
        np.testing.assert_array_equal(row.table.rows[row.row], words)  # whoever has one may go on
        del row, table
        assert automaton() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", TEXTS)
def test_where_nothing_is_forced(compiler: GrammarCompiler, kind: str) -> None:
    tokens = [compiler.vocabulary.byte_tokens[byte] for byte in TEXTS[kind]]
    for _ in range(2):
        matcher = made(compiler, kind)
        for token in tokens:
            assert matcher.advance(token)
            unforced = matcher.place.unforced
            assert not (matcher.forced_tokens() and unforced)


@pytest.mark.slow
def test_the_other_backends_know_nothing_beforehand(compiler: GrammarCompiler) -> None:
    for backend in ("llguidance", "outlines_core"):
        config = ConstraintConfig(backend=backend)  # type: ignore[arg-type]
        matcher = GrammarCompiler(compiler.vocabulary, config=config).compile(regex="a+").matcher()
        token = compiler.vocabulary.byte_tokens[ord("a")]
        assert matcher.advance(token)
        assert matcher.place.mask is None and not matcher.is_finished()


def test_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dfa_backend, "MAX_STEPS", 10)
    found = DfaStates()
    here = found.of(0)
    assert found.of(0) is here
    for token in range(25):
        found.remember(here, token, found.of(token % 3))
        found.remember(here, token, found.of(token % 3))
        assert here.after[token] is found.of(token % 3)
        assert len(here.after) <= 10
    assert found.nbytes < 5000
