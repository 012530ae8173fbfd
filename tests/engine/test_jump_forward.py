"""Greedy output of the embedded model with and without jump-forward, in float32."""

from itertools import accumulate

import pytest

from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.structured import Grammar, GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.engine.demo import CONSTRAINTS
from tests.engine.harness import Harness, Outcome, greedy
from tests.structured.canonical_tokens import encode


def outputs(
    runner: ModelRunner, prompts: list[list[int]], grammar: Grammar, *, jump: bool
) -> list[Outcome]:
    harness = Harness(runner, block_size=16, max_step_tokens=128)
    rids = [harness.add(p, greedy(96), matcher=grammar.matcher(), jump=jump) for p in prompts]
    harness.finish()
    return [harness.outcomes[rid] for rid in rids]


def places(vocabulary: Vocabulary, tokens: list[int]) -> list[tuple[int, int]]:
    """Each token and where its bytes begin."""
    ends = accumulate(len(vocabulary.token_bytes[token]) for token in tokens)
    return list(zip([0, *ends], tokens, strict=False))


def strays(grammar: Grammar, tokens: list[int]) -> bool:
    """Whether an output leaves the canonical tokens at a forced place."""
    matcher = grammar.matcher()
    for token in tokens:
        forced = matcher.forced_tokens()
        if forced and token != forced[0]:
            return True
        assert matcher.advance(token)
    return False


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_greedy_output_is_the_same_where_the_masked_model_is_canonical(
    runner: ModelRunner, compiler: GrammarCompiler, prompts: list[list[int]], name: str
) -> None:
    grammar = compiler.compile(**CONSTRAINTS[name])
    alone = outputs(runner, prompts, grammar, jump=False)
    jumping = outputs(runner, prompts, grammar, jump=True)
    for masked, jumped in zip(alone, jumping, strict=True):
        assert not masked.forced
        assert masked.error == jumped.error == ""
        assert (masked.token_ids == jumped.token_ids) == (not strays(grammar, masked.token_ids))
        assert not strays(grammar, jumped.token_ids)
        if jumped.finish == "stop":  # a whole text has canonical tokens
            text = b"".join(compiler.vocabulary.token_bytes[token] for token in jumped.token_ids)
            canonical = places(compiler.vocabulary, encode(compiler.vocabulary, text))
            taken = places(compiler.vocabulary, jumped.token_ids)
            assert {taken[index] for index in jumped.forced} <= set(canonical)
    assert any(jumped.forced for jumped in jumping)
    if "json_schema" in CONSTRAINTS[name]:
        assert alone[-1].token_ids == jumping[-1].token_ids
        assert len(jumping[-1].forced) >= 5
