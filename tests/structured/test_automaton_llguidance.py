"""The automaton beside llguidance, on a real vocabulary: every mask of random texts is the same."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary

PATTERNS = [
    r"\w+ \w+",
    r".{0,20}",
    r"[0-9]+(\.[0-9]+)?",
    r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
    r"(?:foo|bar|bazé)+",
    r"[가-힣]{1,5}x?",
]


@pytest.fixture(scope="module")
def vocabulary(shared_dir: Path) -> Vocabulary:
    file = shared_dir / "data" / "tokenizers" / "gpt2" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    return Vocabulary.from_tokenizer(tokenizer, 50304, [tokenizer.token_to_id("<|endoftext|>")])


@pytest.fixture(scope="module")
def ours(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, config=ConstraintConfig(backend="automaton"))


@pytest.fixture(scope="module")
def theirs(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, config=ConstraintConfig(backend="llguidance"))


def walk_together(
    first: Matcher, second: Matcher, vocabulary: Vocabulary, steps: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        allowed = first.allowed_mask()
        np.testing.assert_array_equal(allowed, second.allowed_mask())
        assert first.is_accepting() == second.is_accepting()
        allowed[list(vocabulary.eos_token_ids)] = False
        if not allowed.any():
            return
        token = int(random.choice(np.flatnonzero(allowed)))
        assert first.advance(token) and second.advance(token)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_llguidances(
    vocabulary: Vocabulary, ours: GrammarCompiler, theirs: GrammarCompiler, pattern: str
) -> None:
    first, second = ours.compile(regex=pattern), theirs.compile(regex=pattern)
    assert (first.backend, second.backend) == ("automaton", "llguidance")
    for seed in range(4):
        walk_together(first.matcher(), second.matcher(), vocabulary, 10, seed)


@pytest.mark.slow
def test_llguidance_takes_over_from_an_automaton_that_grows(vocabulary: Vocabulary) -> None:
    pattern = "[ab]*a[ab]{14}"
    small = GrammarCompiler(vocabulary, config=ConstraintConfig(max_states=64))
    grammar = small.compile(regex=pattern)
    assert grammar.backend == "automaton"
    whole = GrammarCompiler(vocabulary, config=ConstraintConfig(max_states=1 << 20))
    for seed in range(3):
        matcher, other = grammar.matcher(), whole.compile(regex=pattern).matcher()
        walk_together(matcher, other, vocabulary, 25, seed)
        matcher.rollback(3)
        other.rollback(3)
        np.testing.assert_array_equal(matcher.allowed_mask(), other.allowed_mask())
        assert matcher.error() == ""
