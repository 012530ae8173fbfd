"""What jump-forward does to the distribution of outputs, by enumerating all of them.

`canonical` states it: with P the masked model, Q the same with jump-forward and c(x) the masked
probability of the canonical tokens at the forced places of x, Q(x) = P(x) / c(x) where x is
canonical at its forced places, and 0 elsewhere.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.structured import Grammar, GrammarCompiler, Matcher

Sequence = tuple[int, ...]
Model = Callable[[Sequence], np.ndarray]
"""Logits over the vocabulary after some tokens."""

MERGES = ["a b", "b c", "ab c", "c c", '" :', 'x "', "c d", "d e", "abc d"]
LANGUAGES = [
    {"choices": ["abcd", "abce", "abd", "xabc", 'x":abcde']},
    {"regex": 'x":(ab|abc|e)c*d'},
    {"regex": '(a|x)":abcde(e|cc)?'},
    {"choices": ["eabc", "dabccc", "dabccd"]},
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Compile for a vocabulary of bytes and nine tokens of several bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return GrammarCompiler(tokenizer, eos_token_ids=[len(words)])


@pytest.fixture(params=range(len(LANGUAGES)))
def grammar(request: pytest.FixtureRequest, compiler: GrammarCompiler) -> Grammar:
    # c* is cut off below by the bound on tokens.
    return compiler.compile(**LANGUAGES[request.param])


def table_model(seed: int, size: int, sharpness: float = 1.0) -> Model:
    """Random logits for every history, the same each time."""

    def logits(history: Sequence) -> np.ndarray:
        values = np.random.default_rng([seed, *history]).standard_normal(size)
        return np.asarray(sharpness * values)

    return logits


def probabilities(model: Model, matcher: Matcher, history: Sequence) -> np.ndarray:
    """The masked model's."""
    masked = np.where(matcher.allowed_mask(), model(history), -np.inf)
    weights = np.exp(masked - masked.max())
    return np.asarray(weights / weights.sum())


class Enumeration:
    """All outputs of at most `most` tokens (longer ones cut off there), each with its probability
    and `c`, the probability that the masked model gives to its forced tokens."""

    def __init__(self, grammar: Grammar, model: Model, jump: bool, most: int = 9) -> None:
        self.q: dict[Sequence, float] = {}
        self.c: dict[Sequence, float] = {}
        self._model = model
        self._jump = jump
        self._most = most
        self._visit(grammar.matcher(), (), 1.0, 1.0)

    def _visit(self, matcher: Matcher, history: Sequence, q: float, c: float) -> None:
        if matcher.is_finished() or len(history) >= self._most:
            self.q[history] = q
            self.c[history] = c
            return
        p = probabilities(self._model, matcher, history)
        forced = matcher.forced_tokens()[:1] if self._jump else []
        for token in forced or np.flatnonzero(p).tolist():
            # One forced token at a time is what all of them at once come to.
            steps = (q, c * p[token]) if forced else (q * p[token], c)
            assert matcher.advance(token)
            if matcher.allowed_mask().any():
                self._visit(matcher, (*history, token), *steps)
            else:
                self.q[(*history, token)], self.c[(*history, token)] = steps
            matcher.rollback(1)


def masked_and_jumping(grammar: Grammar, model: Model) -> tuple[Enumeration, Enumeration]:
    return Enumeration(grammar, model, jump=False), Enumeration(grammar, model, jump=True)


def size_of(grammar: Grammar) -> int:
    return len(grammar.matcher().allowed_mask())


@pytest.mark.parametrize("seed", range(5))
def test_jumping_is_the_masked_model_narrowed_at_forced_places(grammar: Grammar, seed: int) -> None:
    masked, jumping = masked_and_jumping(grammar, table_model(seed, size_of(grammar)))
    assert math.isclose(sum(masked.q.values()), 1)
    assert math.isclose(sum(jumping.q.values()), 1)
    assert len(jumping.q) < len(masked.q)  # there are other spellings
    for output, q in jumping.q.items():
        assert math.isclose(masked.q[output], q * jumping.c[output])


@pytest.mark.parametrize("seed", range(5))
def test_the_distance_is_the_probability_of_leaving_the_canonical_tokens(
    grammar: Grammar, seed: int
) -> None:
    masked, jumping = masked_and_jumping(grammar, table_model(seed, size_of(grammar)))
    distance = sum(abs(p - jumping.q.get(x, 0)) for x, p in masked.q.items()) / 2
    stays = sum(q * jumping.c[x] for x, q in jumping.q.items())
    assert distance > 0.01
    assert math.isclose(distance, 1 - stays)
    assert math.isclose(stays, sum(masked.q[x] for x in jumping.q))


def canonical_model(grammar: Grammar, model: Model, share: float) -> Model:
    """`model`, but the canonical token of a forced place has this probability there."""

    def logits(history: Sequence) -> np.ndarray:
        matcher = grammar.matcher()
        assert all(map(matcher.advance, history))
        forced = matcher.forced_tokens()
        values = model(history)
        if forced:
            others = matcher.allowed_mask()
            others[forced[0]] = False
            if others.any():
                rest = np.log(np.exp(values[others]).sum())
                with np.errstate(divide="ignore"):
                    values[others] += np.log(1 - share)
                values[forced[0]] = rest + np.log(share)
        return values

    return logits


def test_a_model_that_is_canonical_there_notices_nothing(grammar: Grammar) -> None:
    model = canonical_model(grammar, table_model(7, size_of(grammar)), share=1.0)
    masked, jumping = masked_and_jumping(grammar, model)
    possible = {x: p for x, p in masked.q.items() if p > 0}
    assert possible.keys() == {x for x, q in jumping.q.items() if q > 0}
    for output, p in possible.items():
        assert math.isclose(p, jumping.q[output])


def test_conditioned_on_canonical_only_where_all_are_equally_sure(
    compiler: GrammarCompiler,
) -> None:
    def conditioned(masked: Enumeration, jumping: Enumeration) -> dict[Sequence, float]:
        total = sum(masked.q[x] for x in jumping.q)
        return {x: masked.q[x] / total for x in jumping.q}

    # One forced place whatever was sampled: c is the same for all if the model gives it 1/2 there.
    grammar = compiler.compile(choices=["eabcx", "dabcx"])
    model = canonical_model(grammar, table_model(3, size_of(grammar)), share=0.5)
    masked, jumping = masked_and_jumping(grammar, model)
    certain = set(jumping.c.values())
    assert max(certain) < 0.9
    assert math.isclose(min(certain), max(certain))
    for output, p in conditioned(masked, jumping).items():
        assert math.isclose(p, jumping.q[output])
    # Not so if it is surer behind one than behind the other.
    masked, jumping = masked_and_jumping(grammar, table_model(3, size_of(grammar)))
    assert not math.isclose(min(jumping.c.values()), max(jumping.c.values()))
    assert any(not math.isclose(p, jumping.q[x]) for x, p in conditioned(masked, jumping).items())


def greedy(grammar: Grammar, model: Model, jump: bool) -> tuple[Sequence, bool]:
    """The output, and whether the first choice was the canonical token at every forced place."""
    matcher = grammar.matcher()
    history: Sequence = ()
    canonical = True
    while not matcher.is_finished() and len(history) < 12:
        token = int(probabilities(model, matcher, history).argmax())
        forced = matcher.forced_tokens()
        if forced and token != forced[0]:
            canonical = False
        if forced and jump:
            token = forced[0]
        assert matcher.advance(token)
        history = (*history, token)
    return history, canonical


def test_greedy_output_is_the_same_exactly_where_the_masked_model_is_canonical(
    grammar: Grammar,
) -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        model = table_model(rng.randrange(10**6), size_of(grammar))
        alone, canonical = greedy(grammar, model, jump=False)
        jumping, _ = greedy(grammar, model, jump=True)
        assert (alone == jumping) == canonical
        seen.add(canonical)
    assert seen == {True, False}
