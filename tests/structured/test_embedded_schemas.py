"""JSON schemas inside grammars."""

import pytest

from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.gbnf import with_exact_schemas
from rootlace.wire.errors import InvalidConstraint
from tests.structured.random_model import accepts, byte_vocabulary

VOCABULARY = byte_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY)


def test_a_schema_in_a_grammar_is_exact() -> None:
    source = 'start: "x" call "y"\ncall: %json {"properties": {"a": {"type": "integer"}}}\n'
    grammar = COMPILER.compile(ebnf=source)
    assert accepts(grammar, VOCABULARY, b'x{"a":1}y')
    assert not accepts(grammar, VOCABULARY, b'x{"a":"1"}y')
    assert not accepts(grammar, VOCABULARY, b'x{"\\u0061":"1"}y')


@pytest.mark.parametrize(
    "schema, reason",
    [
        (
            '{"type": "array", "uniqueItems": true}',
            "line 2: #/uniqueItems: no mask can hold",
        ),
        ('{"type": 3}', "line 2: #/type: "),
        (
            '{"const": -9223372036854775808}',
            "line 2: #/const: no mask can hold 'const'",
        ),
        ('{"x-guidance": 1}', "line 2: #/x-guidance: it must be an object"),
        ('{"type": ', "ebnf: "),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused(schema: str, reason: str) -> None:
    with pytest.raises(InvalidConstraint) as raised:
        COMPILER.compile(ebnf=f"start: call\ncall: %json {schema}\n")
    assert reason in str(raised.value)


def test_only_schemas_are_replaced_and_lines_stay() -> None:
    lark = (
        'start: "%json {" /%json {/ a // %json {\n# %json {}\na: %json {\n "type":\n "null"} | b\n'
    )
    seen = []

    def exact(line: int, schema: dict[str, object]) -> dict[str, object]:
        seen.append((line, schema))
        return {}

    found = with_exact_schemas(lark, exact)
    assert seen == [(3, {"type": "null"})]
    assert found == lark.replace('{\n "type":\n "null"}', "{}\n\n")
