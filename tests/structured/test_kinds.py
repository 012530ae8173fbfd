"""The table of constraint kinds: what each kind promises, and which backend runs it."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.compiler import KINDS
from rootlace.runtime.structured.dfa_backend import AutomatonGrammar
from rootlace.runtime.structured.llguidance_backend import LLGuidanceGrammar
from rootlace.runtime.structured.outlines_backend import OutlinesGrammar
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

OF_EACH: dict[str, Any] = {
    "regex": "[0-9]{3}",
    "choices": ["yes", "no"],
    "ebnf": 'root ::= "a" root "b" | "c"',
    "json_schema": {"type": "array", "items": {"$ref": "#"}},
    "structural_tag": {
        "triggers": ["<f>"],
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    },
}


def compiler(backend: str) -> GrammarCompiler:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config: Any = {"backend": backend}
    return GrammarCompiler(tokenizer, eos_token_ids=[0], config=ConstraintConfig(**config))


def test_the_table_has_the_kinds_of_the_protocol() -> None:
    assert set(get_args(get_type_hints(Constraint)["kind"])) == KINDS.keys() == OF_EACH.keys()


@pytest.mark.parametrize(
    ("backend", "grammar"),
    [
        ("auto", AutomatonGrammar),
        ("automaton", AutomatonGrammar),
        ("llguidance", LLGuidanceGrammar),
        ("outlines_core", OutlinesGrammar),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "choices"])
def test_a_regular_kind_runs_on_the_backend_that_is_configured(
    kind: str, backend: str, grammar: type
) -> None:
    assert type(compiler(backend).compile(**{kind: OF_EACH[kind]})) is grammar


@pytest.mark.parametrize("backend", ["automaton", "outlines_core"])
@pytest.mark.parametrize("kind", ["ebnf", "json_schema", "structural_tag"])
def test_a_backend_for_regular_languages_says_why_it_cannot(kind: str, backend: str) -> None:
    reason = f"{kind}: it is not regular, or too large, for the backend '{backend}'"
    with pytest.raises(InvalidConstraint) as caught:
        compiler(backend).compile(**{kind: OF_EACH[kind]})
    assert str(caught.value) == reason


@pytest.mark.parametrize("kind", OF_EACH)
def test_auto_runs_every_kind(kind: str) -> None:
    assert compiler("auto").compile(**{kind: OF_EACH[kind]}).matcher().allowed_mask().any()


def test_an_unknown_kind_is_refused_with_the_kinds_there_are() -> None:
    unknown = Constraint("choice", "[]")  # type: ignore[arg-type]
    with pytest.raises(InvalidConstraint, match=r"one of regex, choices, .*, not 'choice'"):
        compiler("auto").compile(unknown)
