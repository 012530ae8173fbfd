"""Look-arounds, `\\b` and anchors within a schema's `pattern`: held by every backend's mask."""

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.runtime.structured.json_schema.pattern import regex_of_pattern
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.wire.errors import InvalidConstraint
from tests.structured.json_schema.regex_texts import draw
from tests.structured.random_model import RandomModel, accepts, byte_vocabulary

ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PASSWORD = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{4,}$"
HOSTNAME = r"^(?=.{1,253}\.?$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9]+)*\.?$"

PATTERNS: list[tuple[str, str]] = [
    (ZOD_EMAIL, "aZ.@-'"),
    (PYDANTIC_DECIMAL, "0.+-5x"),
    (PASSWORD, "aA1."),
    (r"\bab\b", "ab -"),
    (r"\Ba", "ab "),
    (r"^a\b.*$", "ab -"),
    (r"a\B", "ab -"),
    ("(?=a)", "ab"),
    ("(?!a)b", "ab"),
    ("^(?!aba)[a-b]+$", "ab"),
    ("(?<!a)b", "abc"),
    ("(?<=a)b$", "abc"),
    (r"^(?!(?:foo|o)$)[fo]+$", "fo"),
    (r"^(?!.*--)[a-]{1,4}$", "a-"),
    (r"^(?:(?!ab).)*$", "abc"),
    (r"^(?!\")[^a]*$", '"a\\n'),
    (r"^(?!.*\\)[\"\\a]*$", '"a\\'),
    ("a^b|c", "abc"),
    ("a$b|c", "abc"),
    ("(^a)*b", "ab"),
    ("(?:a|^)b(?:$|c)", "abc"),
    ("^(?!)|b$", "ab"),
    (r"^((?=a)b|c)$", "abc"),
    (r"^[^\"]*$", '"a\\\n'),
    (r"^[^\\]*$", '"a\\\n'),
    (r"^[^\\\"a]b", '"ab\\'),
    (r"^(?:[^\"]|\\\")*$", '"a\\'),
]  # fmt: skip


def _texts(letters: str, most: int = 5) -> list[str]:
    return ["".join(t) for n in range(most + 1) for t in itertools.product(letters, repeat=n)]


def _string(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _taken(dfa: LazyDfa, text: str) -> bool:
    state = dfa.run(dfa.start, text.encode()) if not dfa.empty else -1
    return state >= 0 and dfa.accepting(state)


@pytest.mark.parametrize("pattern, letters", PATTERNS)
def test_found_where_re_finds_it(pattern: str, letters: str) -> None:
    dfa = LazyDfa(regex_of_pattern(pattern), 1 << 16)
    assert [t for t in _texts(letters) if _taken(dfa, t) != bool(re.search(pattern, t))] == []


@pytest.mark.parametrize("pattern, letters", PATTERNS)
def test_found_where_another_engine_finds_it(pattern: str, letters: str) -> None:
    """jsonschema_rs reads patterns of ECMA-262 with its own regular-expression engine."""
    dfa = LazyDfa(regex_of_pattern(pattern), 1 << 16)
    other = jsonschema_rs.Draft202012Validator(_string(pattern))
    assert [t for t in _texts(letters, 4) if _taken(dfa, t) != other.is_valid(t)] == []


ODD = ["a\n", "\n", "é", "aé", "éa", "a ", "ab\r", "a\u2028", "١", "a١", "ab\n", "\ufeffa", "a\x1c"]


@pytest.mark.parametrize(
    "pattern",
    [r"\ba\b", r"\Ba", r"^(?!\w)", r"^(?!\d)", r"^(?!a$)", "^(?!a.)", r"(?!\s)^.", r"^(?!\W)",
     r"(?<!\w)a", r"(?<=\s)a", r"^(?!(?!\d))"],
)  # fmt: skip
def test_where_the_dialects_differ_both_must_find_it(pattern: str) -> None:
    dfa = LazyDfa(regex_of_pattern(pattern), 1 << 16)
    ecma = pattern.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]")
    for text in ODD:
        if _taken(dfa, text):
            assert re.search(pattern, text), repr(text)
            if r"\s" not in pattern:
                assert re.search(ecma, text, re.ASCII), repr(text)


# --- in JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern, letters", PATTERNS)
@pytest.mark.parametrize("backend", ["automaton", "llguidance"])
def test_json_strings_are_held_to_it(backend: str, pattern: str, letters: str) -> None:
    schema = _string(pattern)
    compiler = _compiler(backend)
    grammar = compiler.compile(json_schema=schema)
    assert grammar.backend == backend
    texts = random.Random(pattern).sample(_texts(letters), 60)
    for text in [*texts, "a@b.co", "a..b@c.de", "0.5", "Aa1.", "ab", "c", "b"]:
        written = json.dumps(text, ensure_ascii=False).encode()
        assert accepts(grammar, compiler.vocabulary, written) == bool(re.search(pattern, text)), (
            text
        )


_MADE: dict[str, GrammarCompiler] = {}


def _compiler(backend: str) -> GrammarCompiler:
    if backend not in _MADE:
        _MADE[backend] = GrammarCompiler(
            byte_vocabulary(),
            config=ConstraintConfig(backend=backend),  # type: ignore[arg-type]
        )
    return _MADE[backend]


CLOSED = {
    "type": "object",
    "properties": {
        "price": {"anyOf": [{"type": "number"}, _string(PYDANTIC_DECIMAL)]},
        "to": _string(ZOD_EMAIL),
        "host": _string(HOSTNAME),
        "secret": {**_string(PASSWORD), "maxLength": 12},
        "word": {"type": "string", "allOf": [{"pattern": r"\bab"}, {"pattern": "^[abc -]+$"}]},
    },
    "required": ["price", "to", "host", "secret", "word"],
    "additionalProperties": False,
}
OPEN = {key: value for key, value in CLOSED.items() if key != "additionalProperties"}


@pytest.mark.parametrize("schema", [CLOSED, OPEN], ids=["closed", "open"])
@pytest.mark.parametrize("backend", ["auto", "llguidance"])
def test_a_model_without_preferences_writes_what_is_valid_without_a_rollback(
    backend: str, schema: dict[str, Any]
) -> None:
    assert PreparedSchema(schema).residuals == ()
    compiler = _compiler(backend)
    grammar = compiler.compile(json_schema=schema, strict=True)
    ended = 0
    for seed in range(6):
        generated = RandomModel(compiler.vocabulary, seed).generate(grammar)
        assert generated.rollbacks == 0
        if generated.text is not None:
            jsonschema.validate(json.loads(generated.text), schema)
            ended += 1
    assert ended >= 3


def test_lengths_formats_and_several_patterns_are_one_automaton() -> None:
    for schema in (
        {**_string("^[a-z]+@[a-z]+$"), "maxLength": 9},
        {**_string(r"^\S+$"), "format": "email", "maxLength": 20},
        {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}, {"maxLength": 4}]},
        {"type": "string", "format": "ipv4", "pattern": r"^1", "minLength": 9},
    ):
        regex = PreparedSchema(schema).regex("compact")
        assert regex is not None
        source = random.Random(str(schema))
        for _ in range(30):
            value = json.loads(draw(regex, source))
            jsonschema.validate(
                value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {r"^(?!_)\w+$": {"type": "integer"}},
         "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": r"^(?!.*--)[a-z-]+$"}},
        {"type": "object", "propertyNames": {"pattern": r"\bab\b"}},
    ],
)  # fmt: skip
def test_keys_are_held_to_it(schema: dict[str, Any]) -> None:
    assert PreparedSchema(schema).residuals == ()
    compiler = _compiler("llguidance")
    grammar = compiler.compile(json_schema=schema)
    for key in ("a", "_a", "a-b", "a--b", "ab", "ab c", "cab", "a b ab", "-ab", "ab-c "):
        valid = jsonschema.Draft202012Validator(schema).is_valid({key: 1})
        text = json.dumps({key: 1}, separators=(",", ":")).encode()
        assert accepts(grammar, compiler.vocabulary, text) == valid, key


def test_what_is_too_large_for_an_automaton_is_refused_in_bounded_time() -> None:
    pattern = "^(?=.*" + "".join(f"(?=.*{a}.{{30}}{b})" for a in "abc" for b in "xyz") + ").*$"
    prepared = PreparedSchema(_string(pattern))
    assert prepared.regex("compact") is None
    with pytest.raises(InvalidConstraint, match=r"#/pattern: .*is too large"):
        _ = prepared.residuals
