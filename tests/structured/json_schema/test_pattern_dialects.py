"""Keys and strings in which one of Python's `re` and ECMA 262 finds a pattern."""

import json
import re
from typing import Any

import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from tests.structured.random_model import accepts, byte_vocabulary

KEYS = ["", "a", "-", "x", "-x", "ax", "éx", "é", "é-", "1", "٣", "axb", "axb\n", "a\rb", "\u00a0"]
ECMA: dict[str, list[str]] = {
    # What `new RegExp(pattern).test(key)` says of them in Node.js.
    r"^(?!\w)": ["", "-", "-x", "éx", "é", "é-", "٣", "\u00a0"],
    r"^\w+$": ["a", "x", "ax", "1", "axb"],
    r"^\d+$": ["1"],
    r"^\D+$": [k for k in KEYS if k not in ("", "1")],
    r"\bx": ["x", "-x", "éx"],
    r"^a.b$": ["axb"],
    r"^\S+$": [k for k in KEYS if k not in ("", "axb\n", "a\rb", "\u00a0")],
    r"^a": ["a", "ax", "axb", "axb\n", "a\rb"],
}
PLAIN = [r"^(?!\w)", r"\bx"]
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module", params=["auto", "llguidance"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), config=ConstraintConfig(backend=request.param))


@pytest.mark.parametrize("additional", [STRING, False, True], ids=json.dumps)
@pytest.mark.parametrize("pattern", ECMA)
def test_a_key_of_one_dialect_alone_escapes_neither_schema(
    compiler: GrammarCompiler, pattern: str, additional: Any
) -> None:
    """A key that both find, or neither, comes with its values; any other does not come. Where
    llguidance cannot tell these apart, keys of plain ASCII alone come."""
    schema = {"patternProperties": {pattern: INTEGER}, "additionalProperties": additional}
    grammar = compiler.compile(json_schema={"type": "object", **schema}, strict=True)
    for key in KEYS:
        ecma, python = key in ECMA[pattern], re.search(pattern, key) is not None
        for value, kind in (("1", INTEGER), ('"s"', STRING)):
            applied = INTEGER if ecma else additional
            right = ecma is python and (applied is True or applied == kind)
            if additional is not False and pattern in PLAIN:
                right = right and key.isascii() and key.isprintable()
            text = f"{{{json.dumps(key, ensure_ascii=False)}:{value}}}"
            assert accepts(grammar, compiler.vocabulary, text.encode()) is right, text


def test_keys_of_several_patterns(compiler: GrammarCompiler) -> None:
    schema = {"^\\w": INTEGER, "^[é-]": STRING}
    closed = {"type": "object", "patternProperties": schema, "additionalProperties": False}
    grammar = compiler.compile(json_schema=closed)
    for text, right in [
        ('{"a":1}', True),
        ('{"a":"s"}', False),
        ('{"-":"s"}', True),
        ('{"é":"s"}', False),
        ('{"é":1}', False),
    ]:
        assert accepts(grammar, compiler.vocabulary, text.encode()) is right, text


@pytest.mark.parametrize("pattern", ECMA)
def test_a_string_is_found_by_both_dialects(compiler: GrammarCompiler, pattern: str) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}}
    grammar = compiler.compile(json_schema=schema)
    for text in KEYS:
        right = text in ECMA[pattern] and re.search(pattern, text) is not None
        data = f"[{json.dumps(text, ensure_ascii=False)}]".encode()
        assert accepts(grammar, compiler.vocabulary, data) is right, text
