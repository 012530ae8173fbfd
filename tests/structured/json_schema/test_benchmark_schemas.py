"""The benchmark's schemas: well-formed, their instances as they say, and matched where finite."""

import json

import pytest
from jsonschema import Draft202012Validator

from benchmarks.given import SCHEMAS, NamedSchema
from rootlace.runtime.structured.json_schema import pattern
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from tests.structured.json_schema.regex_texts import regex_of_schema


def test_there_are_enough_of_either_kind() -> None:
    assert len({schema.name for schema in SCHEMAS}) == len(SCHEMAS) >= 60
    finite = [s.name for s in SCHEMAS if regex_of_schema(s.schema) is not None]
    assert len(finite) >= 45 and len(SCHEMAS) - len(finite) >= 12


@pytest.mark.parametrize("named", SCHEMAS, ids=lambda named: named.name)
def test_instances(named: NamedSchema) -> None:
    Draft202012Validator.check_schema(named.schema)
    assert named.valid and named.invalid
    # Not all formats are known to `jsonschema` without further packages: ours come second.
    usual, ours = (
        Draft202012Validator(named.schema, format_checker=checker)
        for checker in (Draft202012Validator.FORMAT_CHECKER, pattern.checker())
    )
    for instance in named.valid:
        assert usual.is_valid(instance) and ours.is_valid(instance)
    for instance in named.invalid:
        assert not (usual.is_valid(instance) and ours.is_valid(instance)), instance


@pytest.mark.parametrize("named", SCHEMAS, ids=lambda named: named.name)
def test_automaton(named: NamedSchema) -> None:
    regex = regex_of_schema(named.schema)
    if regex is None:
        return
    dfa = LazyDfa(regex, 1 << 14)
    for expected, instances in ((True, named.valid), (False, named.invalid)):
        for instance in instances:
            text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
            state = dfa.run(dfa.start, text.encode())
            assert (state >= 0 and dfa.accepting(state)) == expected, text
