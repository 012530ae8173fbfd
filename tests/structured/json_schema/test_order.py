"""The order of an object's members: that in which the schema has them, whatever it is made of."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from tests.structured.random_model import accepts, byte_vocabulary

N = {"type": "integer"}
BASE = {"type": "object", "properties": {"a": N, "b": N}, "required": ["b", "a"]}
BASE_REF = {"$ref": "#/$defs/base"}


def _own(*names: str) -> dict[str, Any]:
    return {"properties": dict.fromkeys(names, N), "required": list(names)}


SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"allOf": [BASE_REF, _own("c", "d")]}, "abcd"),
    ({"allOf": [_own("c", "d"), BASE_REF]}, "cdab"),
    ({**BASE_REF, **_own("c")}, "abc"),
    ({**_own("c"), **BASE_REF}, "cab"),
    ({"required": ["c"], "allOf": [BASE_REF], "properties": {"c": N}}, "abc"),
    ({"allOf": [{"allOf": [BASE_REF]}, _own("c"), BASE_REF]}, "abc"),
    ({"allOf": [{"$ref": "#/$defs/above"}, _own("d")]}, "abcd"),
    ({**_own("c"), "anyOf": [BASE_REF, {**BASE_REF, "maxProperties": 3}]}, "cab"),
    ({"anyOf": [BASE_REF, {**BASE_REF, "maxProperties": 3}], **_own("c")}, "abc"),
    ({"oneOf": [BASE_REF, False], **_own("c")}, "abc"),
    ({"allOf": [BASE_REF, _own("b", "c")]}, "abc"),
]


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("schema, order", SCHEMAS, ids=lambda value: json.dumps(value)[:50])
def test_members_come_as_written(
    backend: str, closed: bool, schema: dict[str, Any], order: str
) -> None:
    above = {**BASE_REF, **_own("c")}
    schema = {"$defs": {"base": BASE, "above": above}, **schema}
    if closed:
        schema["unevaluatedProperties"] = False
    config = ConstraintConfig(backend=backend)  # type: ignore[arg-type]
    compiler = GrammarCompiler(byte_vocabulary(), config=config)
    grammar = compiler.compile(json_schema=schema)
    for names in itertools.permutations(order):
        value = dict.fromkeys(names, 1)
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
        text = json.dumps(value, separators=(",", ":")).encode()
        assert accepts(grammar, compiler.vocabulary, text) == ("".join(names) == order), text
