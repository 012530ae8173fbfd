"""White space of JSON: one definition, whichever machine holds the text and whoever asks."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.json_schema.json_text import WHITESPACES
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.canonical_tokens import encode

N = {"type": "integer"}
PAIR = {"type": "object", "properties": {"a": N, "b": N}, "required": ["a", "b"]}
CLOSED = {**PAIR, "additionalProperties": False}
TREE: dict[str, Any] = {
    "$id": "tree",
    "$ref": "#/$defs/t",
    "$defs": {
        "t": {
            "type": "object",
            "properties": {"a": N, "b": {"anyOf": [N, {"$ref": "#/$defs/t"}]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    },
}
CHECKED = {**PAIR, "not": {"properties": {"a": {"const": 7}}, "required": ["a"]}}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "",
        "content": {"type": "json_schema", "json_schema": PAIR},
        "end": "",
    },
}

OBJECTS: dict[str, dict[str, Any]] = {
    "closed": {"json_schema": CLOSED},
    "open": {"json_schema": PAIR},
    "any object": {"json_schema": {"type": "object"}},
    "anything": {"json_schema": True},
    "recursive": {"json_schema": TREE},
    "union": {"json_schema": {"anyOf": [{"type": "null"}, CLOSED]}},
    "open union": {"json_schema": {"anyOf": [{"type": "null"}, PAIR]}},
    "constant": {"json_schema": {"const": {"a": 1, "b": 2}}},
    "constant in a union": {"json_schema": {"anyOf": [{"const": {"a": 1, "b": 2}}, TREE]}},
    "numbers as constants": {
        "json_schema": {**PAIR, "properties": {"a": {"enum": [1, 1.5]}, "b": N}}
    },
    "checked": {"json_schema": CHECKED},
    "structural tag": {"structural_tag": TAG},
    "schema in a grammar": {"ebnf": f"start: %json {json.dumps(PAIR)}"},
}
"""What holds {"a": 1, "b": 2}, by each way there is."""
LISTS: dict[str, dict[str, Any]] = {
    "array": {"json_schema": {"type": "array", "items": N}},
    "tuple": {"json_schema": {"type": "array", "prefixItems": [N, N], "items": False}},
    "array of anything": {"json_schema": {"type": "array"}},
    "numbers as constants": {
        "json_schema": {"type": "array", "prefixItems": [{"enum": [1, 1.5]}, N], "minItems": 2}
    },
    "constant": {"json_schema": {"const": [1, 2]}},
}
"""What holds [1, 2]."""
EMPTY: dict[str, dict[str, Any]] = {
    "closed": {"json_schema": {"type": "object", "additionalProperties": False}},
    "open": {"json_schema": {"type": "object", "properties": {"a": N}}},
    "constant": {"json_schema": {"const": {}}},
}
"""What holds {}."""

VALUE = {"a": 1, "b": 2}
TAKEN = [
    '{"a":1,"b":2}',
    json.dumps(VALUE),
    json.dumps(VALUE, indent=2),
    json.dumps(VALUE, indent=4),
    json.dumps(VALUE, indent="\t"),
    json.dumps(VALUE, indent=0),
    json.dumps(VALUE, indent=24),
    '{ "a" : 1 , "b" : 2 }',
    '{"a":1, "b": 2}',
    '{\n"a"\n:\n1\n,\n"b"\n:\n2\n}',
    '{\n\t\t\t\t\t\t"a": 1,\n "b": 2}',
]
REFUSED = [
    json.dumps(VALUE, indent=25),
    json.dumps(VALUE, indent="\t" * 7),
    '{"a":  1, "b": 2}',
    '{"a": 1,\n\n"b": 2}',
    '{"a": 1, \n"b": 2}',
    '{"a":\t1,"b":2}',
    '{"a":\r1,"b":2}',
    '{\n \t"a":1,"b":2}',
    '{"a":1,"b":2 \n}',
    ' {"a":1,"b":2}',
    '{"a":1,"b":2} ',
    '{"a":1,"b":2}\n',
    '{"a" 1,"b":2}',
    '{"a":1 "b":2}',
    '{"a":1 0,"b":2}',
]
BACKENDS = ("auto", "llguidance")


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return Vocabulary((demo_model / "tokenizer.json").read_text("utf-8"), 4096, [2])


@pytest.fixture(scope="module")
def compilers(vocabulary: Vocabulary) -> dict[str, GrammarCompiler]:
    return {
        backend: GrammarCompiler(vocabulary, config=ConstraintConfig(backend=backend))
        for backend in (*BACKENDS, "outlines_core")
    }


def takes(vocabulary: Vocabulary, grammar: Grammar, text: str) -> bool:
    """Byte by byte, and in the tokenizer's tokens, which have to agree."""
    found = set()
    for tokens in (vocabulary.bytewise(text.encode()), encode(vocabulary, text.encode())):
        matcher = grammar.matcher()
        fits = True
        for token in tokens or []:
            allowed = matcher.allowed_mask()[token]
            fits = matcher.advance(token)
            assert fits == allowed or not fits, text
            if not fits:
                break
        found.add(fits and matcher.is_accepting())
    assert len(found) == 1, text
    return found.pop()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OBJECTS)
def test_all_take_the_same_texts(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], backend: str, name: str
) -> None:
    grammar = compilers[backend].compile(**OBJECTS[name])
    assert {text: takes(vocabulary, grammar, text) for text in [*TAKEN, *REFUSED]} == {
        **dict.fromkeys(TAKEN, True),
        **dict.fromkeys(REFUSED, False),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LISTS)
def test_lists_too(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], backend: str, name: str
) -> None:
    grammar = compilers[backend].compile(**LISTS[name])
    for gap in ("", *WHITESPACES):
        assert takes(vocabulary, grammar, f"[{gap}1{gap},{gap}2{gap}]"), gap
    for gap in ("  ", "\n\n", "\t", " \n", "\n \t"):
        for text in (f"[{gap}1,2]", f"[1{gap},2]", f"[1,{gap}2]", f"[1,2{gap}]"):
            assert not takes(vocabulary, grammar, text), text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EMPTY)
def test_what_is_empty_has_room_for_one(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], backend: str, name: str
) -> None:
    grammar = compilers[backend].compile(**EMPTY[name])
    for gap in ("", *WHITESPACES):
        assert takes(vocabulary, grammar, f"{{{gap}}}"), gap
    assert not takes(vocabulary, grammar, "{  }")


def test_outlines_core_takes_them_too(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler]
) -> None:
    grammar = compilers["outlines_core"].compile(**OBJECTS["closed"])
    assert all(takes(vocabulary, grammar, text) for text in TAKEN)
    assert not any(takes(vocabulary, grammar, text) for text in REFUSED)


@pytest.mark.parametrize("name", [*OBJECTS, *LISTS])
def test_compact_has_none(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], name: str
) -> None:
    given, tight = (OBJECTS[name], TAKEN[0]) if name in OBJECTS else (LISTS[name], "[1,2]")
    for backend in BACKENDS:
        grammar = compilers[backend].compile(**given, whitespace="compact")
        assert takes(vocabulary, grammar, tight)
        assert not takes(vocabulary, grammar, tight.replace(",", ", "))
        assert not takes(vocabulary, grammar, tight.replace("1", "\n1"))


def test_a_grammar_that_says_its_own_white_space_has_that(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler]
) -> None:
    schema = {**PAIR, "x-guidance": {"whitespace_flexible": False, "key_separator": ": "}}
    grammar = compilers["auto"].compile(ebnf=f"start: %json {json.dumps(schema)}")
    assert takes(vocabulary, grammar, '{"a": 1,"b": 2}')
    assert not takes(vocabulary, grammar, '{"a":1,"b":2}')


# ---------------------------------------------------------------- it cannot run away


def follow(
    vocabulary: Vocabulary, matcher: Matcher, choose: Callable[[list[int]], int], most: int
) -> bytes:
    """The text of a model that chooses among what is allowed."""
    text = b""
    for _ in range(most):
        for token in matcher.forced_tokens():
            assert matcher.advance(token)
            text += vocabulary.token_bytes[token]
        if matcher.is_finished():
            break
        allowed = np.flatnonzero(matcher.allowed_mask()).tolist()
        token = choose(allowed)
        assert matcher.advance(token)
        if token in vocabulary.eos_token_ids:
            break
        text += vocabulary.token_bytes[token]
    return text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["closed", "open", "recursive", "checked", "structural tag"])
def test_a_model_that_always_wants_white_space_comes_to_an_end(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], backend: str, name: str
) -> None:
    """Of single characters, the most there can be: what is between two tokens is at most one
    break and 24 spaces, whatever the model wants."""
    blank = [vocabulary.token_of(one) for one in (b" ", b"\n", b"\t")]
    end = [*vocabulary.eos_token_ids]
    order = {token: place for place, token in enumerate([*end, *blank])}
    later = [vocabulary.token_of(one.encode()) for one in '}"ab:,12']
    order |= {token: len(order) + place for place, token in enumerate(later)}
    matcher = compilers[backend].compile(**OBJECTS[name]).matcher()

    def choose(allowed: list[int]) -> int:
        return min(allowed, key=lambda token: order.get(token, len(order)))

    text = follow(vocabulary, matcher, choose, 600).decode()
    json.loads(text)
    assert matcher.is_accepting()
    between = max(len(run) for run in "".join(c if c.isspace() else "x" for c in text).split("x"))
    assert 1 <= between <= 25


# ---------------------------------------------------------------- what is certain is still forced


@pytest.mark.parametrize("name", ["closed", "open", "recursive", "structural tag"])
def test_a_key_is_forced_whatever_is_before_it(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], name: str
) -> None:
    for backend in BACKENDS:
        for begun in ('{"', '{\n  "', '{ "'):
            matcher = compilers[backend].compile(**OBJECTS[name]).matcher()
            for token in vocabulary.bytewise(begun.encode()) or []:
                assert matcher.advance(token)
            assert matcher.forced_text() == b'a"'
            compact = compilers[backend].compile(**OBJECTS[name], whitespace="compact").matcher()
            for token in vocabulary.bytewise(b'{"') or []:
                assert compact.advance(token)
            assert compact.forced_text() == b'a":'


# ---------------------------------------------------------------- the machines agree on more


@pytest.mark.parametrize("name", [*OBJECTS])
def test_random_white_space_is_taken_or_refused_by_all(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], name: str
) -> None:
    source = random.Random(name)
    grammars = [compilers[backend].compile(**OBJECTS[name]) for backend in BACKENDS]
    pieces = ["{", '"a"', ":", "1", ",", '"b"', ":", "2", "}"]
    for _ in range(40):
        gaps = [source.choice(WHITESPACES) if source.random() < 0.6 else "" for _ in pieces[1:]]
        if source.random() < 0.5:
            gaps[source.randrange(len(gaps))] += source.choice([" ", "\n", "\t", "\r", "\x0b"])
        text = pieces[0] + "".join(map("".join, zip(gaps, pieces[1:], strict=True)))
        expected = all(gap in ("", *WHITESPACES) for gap in gaps)
        assert [takes(vocabulary, grammar, text) for grammar in grammars] == [expected] * 2, text
