"""Automata for a device against matchers: masks, steps, bounds, and when they are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import AutomatonState, SteppedAutomaton
from rootlace.runtime.model.automaton_table import AutomatonArena
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.dfa_backend import (
    AutomatonGrammar,
    SteppedBuilds,
    stepped_automaton,
)
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.parse import parse
from tests.structured.test_automaton_grammar import VOCABULARY, grammar
from tests.structured.test_token_table import finite
from tests.structured.tiny_vocabulary import BytewiseTokenizer
from tests.waiting import eventually

SIZE = VOCABULARY.size
EOS = VOCABULARY.eos_token_ids


def stepped(pattern: str, max_states: int = 4096, max_bytes: int = 1 << 20) -> SteppedAutomaton:
    dfa = LazyDfa(parse(pattern), 16384)
    made = stepped_automaton(VOCABULARY.trie, EOS, dfa, max_states, max_bytes)
    assert made is not None
    return made


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:SIZE].astype(bool)


patterns = finite.map(lambda made: made[0]) | st.tuples(finite, finite).map(
    lambda two: f"(?:{two[0][0]}|[^a]|.1)*(?:{two[1][0]})"
)


@settings(max_examples=60, deadline=None)
@given(patterns)
def test_a_device_steps_as_matchers_do(pattern: str) -> None:
    """Random walks, with tokens that are forbidden and ends of the sequence among them: what the
    arena's tables say after each token is what a matcher says."""
    made = grammar(pattern, max_states=16384)
    automaton = stepped_automaton(VOCABULARY.trie, EOS, made.dfa, 4096, 1 << 20)
    if automaton is None:
        assert made.dfa.empty
        return
    arena = AutomatonArena(SIZE, "cpu", 1 << 16)
    rng = np.random.default_rng(0)
    for _ in range(6):
        matcher = made.matcher()
        arena.begin_step()
        state = arena.state(AutomatonState(automaton, made.dfa.start))
        arena.flush()
        for _ in range(8):
            words = np.empty(-(-SIZE // 32), np.int32)
            matcher.fill_bitmask(words)
            allowed = np.flatnonzero(bits(words))
            token = int(rng.integers(SIZE))
            if len(allowed) and rng.random() < 0.9:
                token = int(rng.choice(allowed))
            after, masks = REFERENCE.step_automata(
                torch.tensor([state, state], dtype=torch.int32),
                torch.tensor([-1, 0], dtype=torch.int32),
                torch.tensor([token], dtype=torch.int32),
                torch.tensor([-1, -1], dtype=torch.int32),
                arena.tables,
            )
            found = arena.tables.masks[masks.long()].numpy()
            np.testing.assert_array_equal(found[0], words)
            taken = matcher.advance(token)
            assert taken == bool(bits(words)[token])
            if not taken or token in EOS:
                assert after[1] == 0 and not found[1].any()
                break
            state = int(after[1])


def test_states_that_allow_the_same_share_a_mask() -> None:
    made = stepped("[ab]{0,300}")
    assert len(made.mask_of) == 301
    assert len(made.masks) <= 5  # tokens are at most three letters long
    assert made.nbytes < 20000


def test_bounds() -> None:
    trie = VOCABULARY.trie
    pattern = "[ab]{0,300}"

    def made(max_states: int, max_bytes: int, of: int = 16384) -> SteppedAutomaton | None:
        dfa = LazyDfa(parse(pattern), of)
        return stepped_automaton(trie, EOS, dfa, max_states, max_bytes)

    whole = made(301, 1 << 20)
    assert whole is not None
    assert made(300, 1 << 20) is None
    assert made(301, 2 * whole.nbytes) is not None
    assert (
        made(301, whole.nbytes - 4 * 302) is None
    )  # 301 of them are `mask_of`, which is not asked
    assert made(301, 8) is None
    # Requests keep most of what the automaton may grow to.
    assert made(4096, 1 << 20, of=1000) is None


def test_an_automaton_that_is_too_large_stays_usable() -> None:
    dfa = LazyDfa(parse("(?:a|b)*a(?:a|b){12}"), 1000)
    assert stepped_automaton(VOCABULARY.trie, EOS, dfa, 4096, 1 << 20) is None
    assert dfa.num_states < 300


class CountedBuilds(SteppedBuilds):
    submitted = 0

    def submit(self, *build: Any) -> None:
        self.submitted += 1
        super().submit(*build)


def test_nobody_waits_for_it() -> None:
    builds = CountedBuilds()
    builds._one_at_a_time.acquire()
    made = AutomatonGrammar(
        VOCABULARY,
        LazyDfa(parse("a[01]*b"), 1000),
        BytewiseTokenizer(VOCABULARY),
        pytest.fail,
        builds=builds,
    )
    first, second = made.matcher(), made.matcher()
    before = made.nbytes
    assert [first.automaton(), second.automaton(), first.automaton()] == [None] * 3
    assert builds.submitted == 1
    builds._one_at_a_time.release()
    eventually(lambda: first.automaton() is not None)
    here, there = first.automaton(), second.automaton()
    assert here is not None and there is not None and there.automaton is here.automaton
    assert made.nbytes > before
    token = VOCABULARY.token_bytes.index(b"a")
    assert first.advance(token)
    after = first.automaton()
    assert after is not None
    expected = here.automaton.next_state[here.state, here.automaton.token_class[token]]
    assert after.state == expected


def test_who_has_an_automaton() -> None:
    """Regular constraints have one; what llguidance runs has none, nor has what is checked."""
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))} | {"</s>": 256}, [])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    compiler = GrammarCompiler(tokenizer, eos_token_ids=[256])
    regular = compiler.compile(regex="a[01]*").matcher()
    eventually(lambda: regular.automaton() is not None)
    others = [
        compiler.compile(ebnf='root ::= "a" root "b" | "c"'),
        compiler.compile(json_schema={"type": "array", "uniqueItems": True}),
    ]
    assert [other.matcher().automaton() for other in others] == [None, None]
    assert regular.advance(tokenizer.token_to_id("a")) and regular.automaton() is not None
    assert regular.advance(256) and regular.automaton() is None
