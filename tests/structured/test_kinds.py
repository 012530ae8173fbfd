"""The table of constraint kinds: what each kind promises, and which backend runs it."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.language import sampling
from rootlace.language.sampling import SOURCES
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.server.http.constraints import ConstraintBody, sglang_constraint
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.compiler import KINDS
from rootlace.runtime.structured.dfa_backend import AutomatonGrammar
from rootlace.runtime.structured.llguidance_backend import LLGuidanceGrammar
from rootlace.runtime.structured.outlines_backend import OutlinesGrammar
from rootlace.types import constraint_kinds
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


def test_all_tables_have_the_kinds_of_the_protocol() -> None:
    """The keywords of `gen`, the fields over HTTP and the documentation follow from these
    tables."""
    kinds = set(get_args(get_type_hints(Constraint)["kind"]))
    assert kinds == KINDS.keys() == constraint_kinds.KINDS.keys() == OF_EACH.keys()
    assert kinds == get_type_hints(constraint_kinds.ConstraintKeywords).keys()
    assert kinds < set(SOURCES) and kinds < {*ConstraintBody.__struct_fields__}
    page = (Path(__file__).parents[2] / "docs" / "constraints.md").read_text()
    assert not [kind for kind in kinds if f"| `{kind}=` |" not in page]


def test_few_files_know_a_kind() -> None:
    """List the files that a new kind changes. (Tool calls use structural tags, and name them.)"""
    of_ours = {"structural_tag.py", "tool_calls.py", "chat_request.py", "chat_pipeline.py"}
    root = Path(__file__).parents[2]
    files = [*(root / "frontend").rglob("*.py"), *(root / "runtime").rglob("*.py")]
    naming = [path for path in files if '"structural_tag"' in path.read_text()]
    assert {path.name for path in naming} - of_ours == {
        "protocol.py", "constraint_kinds.py", "compiler.py",
        "constraints.py",  # vLLM's and OpenAI's own fields
        "sampling.py",  # what `tools=` becomes
    }  # fmt: skip


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_value_is_written_as_its_source_wherever_it_is_given(kind: str) -> None:
    value = OF_EACH[kind]
    written = constraint_kinds.KINDS[kind].write(value)  # type: ignore[index]
    asked = sampling.resolve({}, sampling.normalise({kind: value}, "gen()")).constraint
    assert asked == Constraint(kind, written)  # type: ignore[arg-type]
    body = msgspec.convert({kind: value}, ConstraintBody)
    posted = sglang_constraint(body, "sampling_params")
    assert posted is not None and posted.param == f"sampling_params.{kind}"
    assert posted.constraint.kind == kind
    if isinstance(value, str):
        assert posted.constraint.source == written
    else:
        assert json.loads(posted.constraint.source) == json.loads(written)


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
