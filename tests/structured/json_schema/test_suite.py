"""The JSON-Schema-Test-Suite (draft 2020-12), through the whole compiler."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from rootlace.runtime.structured.checked_backend import CheckedGrammar
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.llguidance_backend import HybridGrammar
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint
from tests.structured.random_model import RandomModel, accepts, byte_vocabulary


@dataclass
class Tally:
    satisfiable: int = 0
    served: int = 0
    invalid: int = 0
    accepted_invalid: list[str] = field(default_factory=list)
    valid: int = 0
    accepted_valid: int = 0
    not_served: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    """Groups in which an automaton and llguidance did not agree."""


@dataclass
class Group:
    name: str
    schema: Any
    tests: list[dict[str, Any]]


def groups(folder: Path) -> Iterator[Group]:
    for path in sorted((folder / "tests/draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text()):
            yield Group(f"{path.stem}: {group['description']}", group["schema"], group["tests"])


def remote_documents(folder: Path) -> dict[str, Any]:
    remotes = folder / "remotes"
    return {
        f"http://localhost:1234/{path.relative_to(remotes)}": json.loads(path.read_text())
        for path in remotes.rglob("*.json")
    }


@pytest.fixture(scope="module")
def suite(shared_dir: Path) -> Path:
    return shared_dir / "data/json-schema-test-suite"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return byte_vocabulary()


@pytest.mark.parametrize(
    "whitespace", ["compact", pytest.param("flexible", marks=pytest.mark.slow)]
)
def test_no_invalid_instance_and_nearly_every_group(
    suite: Path, vocabulary: Vocabulary, whitespace: str
) -> None:
    documents = remote_documents(suite)
    registry: Registry[Any] = REGISTRY.with_resources(
        (uri, Resource.from_contents(document, default_specification=DRAFT202012))
        for uri, document in documents.items()
    )
    compiler = GrammarCompiler(vocabulary, documents=documents)
    tally = Tally()
    for seed, group in enumerate(groups(suite)):
        _run(group, seed, compiler, registry, whitespace, tally)
    print(
        f"{whitespace}: served {tally.served} of {tally.satisfiable} satisfiable groups;"
        f" accepted {len(tally.accepted_invalid)} of {tally.invalid} invalid and"
        f" {tally.accepted_valid} of {tally.valid} valid instances"
    )
    assert tally.accepted_invalid == []
    assert tally.given_up == []
    assert tally.invalid > 450
    assert tally.served >= 0.98 * tally.satisfiable, tally.not_served
    assert tally.satisfiable > 350
    for message in tally.refused:
        assert re.match(r"json_schema: (#|http)\S*: .|json_schema: .*false", message), message


def _run(
    group: Group,
    seed: int,
    compiler: GrammarCompiler,
    registry: Registry[Any],
    whitespace: str,
    tally: Tally,
) -> None:
    satisfiable = any(test["valid"] for test in group.tests)
    tally.satisfiable += satisfiable
    try:
        grammar = compiler.compile(json_schema=group.schema, whitespace=whitespace)
    except InvalidConstraint as error:
        tally.refused.append(str(error))
        if satisfiable:
            tally.not_served.append(f"{group.name}: {error}")
        return
    for test in group.tests:
        separators = (",", ":") if whitespace == "compact" else (", ", ": ")
        text = json.dumps(test["data"], separators=separators, ensure_ascii=False)
        accepted = accepts(grammar, compiler.vocabulary, text.encode())
        inner = grammar.inner if isinstance(grammar, CheckedGrammar) else grammar
        if isinstance(inner, HybridGrammar) and not inner.trusted:
            tally.given_up.append(f"{group.name}: {text}")
        if test["valid"]:
            tally.valid += 1
            tally.accepted_valid += accepted
        else:
            tally.invalid += 1
            if accepted:
                tally.accepted_invalid.append(f"{group.name}: {text}")
    if not satisfiable:
        return
    generated = RandomModel(compiler.vocabulary, seed).generate(grammar)
    if generated.text is None:
        tally.not_served.append(f"{group.name}: {generated.reason}")
        return
    validator = jsonschema.Draft202012Validator(_for_re(group.schema), registry=registry)
    assert validator.is_valid(json.loads(generated.text)), (group.name, generated.text)
    tally.served += 1


def _for_re(schema: Any) -> Any:
    """Replace classes that `re` lacks in patterns (its letters, as ours, are more)."""
    return json.loads(json.dumps(schema).replace(r"\\p{Letter}", r"[^\\W\\d_]"))
