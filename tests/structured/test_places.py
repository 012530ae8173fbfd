"""What matchers remember of automata: steps taken at once, masks that are there."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler, Matcher, dfa_backend
from rootlace.runtime.structured.dfa_backend import DfaStates
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
    fast = 0
    for count, token in enumerate(tokens):
        expected = other.mask_row()
        assert other.ready is None or other.ready is expected
        assert not other.try_advance_fast(compiler.vocabulary.eos_token_ids[0], False)
        last = count + 1 == len(tokens)
        taken = other.try_advance_fast(token, False)
        if kind == "open":  # the fast way ends where the automaton does
            fast += taken
            assert taken or other.advance(token)
            continue
        assert taken is not last, "what may be the end is not taken in"
        if not last:
            row = other.ready
            assert row is not None and row.table.filled(row.row)
            mask = np.unpackbits(row.table.rows[row.row].view(np.uint8), bitorder="little")
            np.testing.assert_array_equal(mask[:4096].astype(bool), other.allowed_mask())
    assert fast > 1 if kind == "open" else other.advance(tokens[-1])
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
def test_what_is_forced_is_not_passed_by(compiler: GrammarCompiler, kind: str) -> None:
    """With jumps a step is taken at once only to where nothing is forced."""
    tokens = [compiler.vocabulary.byte_tokens[byte] for byte in TEXTS[kind]]
    for _ in range(2):
        matcher = made(compiler, kind)
        for token in tokens:
            if matcher.try_advance_fast(token, True):
                assert not matcher.forced_tokens()
            else:
                assert matcher.advance(token)
                matcher.forced_tokens()


@pytest.mark.slow
def test_the_other_backends_take_nothing_in_at_once(compiler: GrammarCompiler) -> None:
    for backend in ("llguidance", "outlines_core"):
        config = ConstraintConfig(backend=backend)  # type: ignore[arg-type]
        matcher = GrammarCompiler(compiler.vocabulary, config=config).compile(regex="a+").matcher()
        token = compiler.vocabulary.byte_tokens[ord("a")]
        assert not matcher.try_advance_fast(token, False) and matcher.ready is None
        assert matcher.advance(token)


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
