"""Free text with islands: what the islands hold is valid, what is outside is free."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.runtime.structured.structural_tag import weakest
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
STATE = {"enum": ["on", "off", 1]}
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": WEATHER, "end": "</function>"},
        {"begin": "<function=switch>", "schema": STATE, "end": "</function>"},
        {"begin": "[", "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<function=", "["],
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<eos>", *alphabet, "<f", "unction", '{"', ">{", "ab", "Ġ<", "x[", "=switch"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarCompiler(tokenizer, eos_token_ids=[0])


def feed(compiler: GrammarCompiler, matcher: Matcher, text: str) -> bool:
    """Whether all of it is taken in, byte by byte."""
    matcher.reset()
    tokens = [compiler.vocabulary.byte_tokens[byte] for byte in text.encode()]
    return all(matcher.advance(token) for token in tokens)


@pytest.mark.parametrize(
    ("text", "taken", "complete"),
    [
        ("", True, True),
        ("free text, é\n\x00", True, True),
        ("almost <function", True, True),
        ("now <function=", True, False),
        ("now <function=x", False, False),
        ('<function=weather>{"city":"Rom"}</function>', True, True),
        ('a<function=weather>{"city":"Rom","days":3}</function> b', True, True),
        ('<function=weather>{"days":3', False, False),
        ('<function=weather>{"city":"Roma', False, False),
        ('<function=switch>"on"</function>[true[false then [', True, False),
        ("<function=switch>1</function>", True, True),
        ("<function=switch>2", False, False),
        ("[maybe", False, False),
        ("<<<function=switch>", True, False),
    ],
)
def test_islands(compiler: GrammarCompiler, text: str, taken: bool, complete: bool) -> None:
    grammar = compiler.compile(structural_tag=TAGS)
    assert grammar.backend == "llguidance"
    matcher = grammar.matcher()
    assert feed(compiler, matcher, text) == taken
    if taken:
        assert matcher.is_accepting() == complete
        assert not matcher.is_finished()


def test_text_is_forced_in_islands_only(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(structural_tag=TAGS, whitespace="compact").matcher()
    assert feed(compiler, matcher, "so: <function")
    assert matcher.forced_text() == b""
    assert matcher.forced_tokens() == []
    assert feed(compiler, matcher, "so: <function=w")
    assert matcher.forced_text() == b'eather>{"city":"'
    assert feed(compiler, matcher, "so: <function=s")
    assert matcher.forced_text() == b"witch>"
    matcher = compiler.compile(structural_tag=TAGS).matcher()
    assert feed(compiler, matcher, "so: <function=w")
    assert matcher.forced_text() == b"eather>{"
    assert feed(compiler, matcher, 'so: <function=weather>{\n  "')
    assert matcher.forced_text() == b'city"'


def test_random_texts_hold_valid_islands_only(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(structural_tag=TAGS)
    size = compiler.vocabulary.size
    rng = random.Random(2)
    found = 0
    for _ in range(25):
        matcher, text = grammar.matcher(), b""
        while True:
            tokens = np.flatnonzero(matcher.allowed_mask())
            assert (0 in tokens) == matcher.is_accepting()
            begun = [t for t in tokens if t >= size - 8]
            token = int(rng.choice(begun if begun and rng.random() < 0.5 else tokens))
            if token == 0 or (0 in tokens and len(text) > 60):
                break
            assert matcher.advance(token)
            text += compiler.vocabulary.token_bytes[token]
            if len(text) > 400:
                break
        for name, inside in re.findall(rb"<function=(\w+)>(.*?)</function>", text, flags=re.DOTALL):
            value = json.loads(inside)
            jsonschema.validate(value, WEATHER if name == b"weather" else STATE)
            found += 1
        for word in re.findall(rb"\[(.{4})", re.sub(rb'"(\\.|[^"\\])*"', b'""', text)):
            assert word in (b"true", b"fals")
            found += 1
    assert found > 20


def triggered(**more: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": {"type": "boolean"}}
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<t"],
            "tags": [{"begin": "<t>", "content": content, "end": "</t>"}],
            **more,
        },
    }


def test_the_newer_notation(compiler: GrammarCompiler) -> None:
    def takes(text: str, **more: Any) -> tuple[bool, bool, bool]:
        matcher = compiler.compile(structural_tag=triggered(**more)).matcher()
        return feed(compiler, matcher, text), matcher.is_accepting(), matcher.is_finished()

    tag = "<t>true</t>"
    one = "a " + tag
    assert takes("plain") == (True, True, False)
    assert takes(one + " b" + one) == (True, True, False)
    assert takes("plain", stop_after_first=True) == (True, True, False)
    assert takes(one, stop_after_first=True) == (True, True, True)
    assert takes(one + "b", stop_after_first=True)[0] is False
    # One that there has to be comes first, as in xgrammar: a model might say anything for ever.
    for stop in (False, True):
        assert takes("plain", at_least_one=True, stop_after_first=stop)[0] is False
        assert takes(one, at_least_one=True, stop_after_first=stop)[0] is False
        assert takes(tag, at_least_one=True, stop_after_first=stop) == (True, True, stop)
        assert takes("<t>", at_least_one=True, stop_after_first=stop) == (True, False, False)
    assert takes(tag + " b" + one, at_least_one=True) == (True, True, False)
    assert takes(tag + " b <t>1", at_least_one=True)[0] is False


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


CALL = '<t>{"x":1}</t>'


@pytest.mark.parametrize(
    ("text", "taken", "complete"),
    [
        ('{"days":3,"city":"Rom"}', False, False),
        ('{"city":"Rom"}', True, True),
        (CALL, True, True),
        (f"{CALL}\n{CALL}", True, True),
        (f'{CALL}\n{{"city"', False, False),
        ("so: ", False, False),
    ],
)
def test_calls_or_json(compiler: GrammarCompiler, text: str, taken: bool, complete: bool) -> None:
    calls = [("<t>", tool_calls.arguments({"type": "object"}, True))]
    tag = tool_calls.or_json(calls, "</t>", WEATHER, last=False)
    matcher = compiler.compile(structural_tag=tag).matcher()
    assert feed(compiler, matcher, text) == taken
    if taken:
        assert matcher.is_accepting() == complete


LENIENT: dict[str, tuple[dict[str, Any], str, str]] = {
    # A schema, arguments that a lenient one allows, and some that it does not.
    "of which a mask holds most": (
        {"properties": {"a": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}}},
        '{"a":[null,null]}',
        '{"a":[1]}',
    ),
    "that is malformed": ({"properties": {"a": {"type": "objekt"}}}, '{"a":1}', "[]"),
    "that nothing satisfies": (
        {"type": "object", "minProperties": 2, "maxProperties": 1},
        "{}",
        "1",
    ),
    "that refers to nothing": ({"$ref": "#/$defs/A"}, '{"a":1}', "1"),
    "with a pattern beyond all machines": (
        {"properties": {"a": {"pattern": r"(a)\1"}}},
        '{"a":"x"}',
        "null",
    ),
    "that nests too deep": (_deep(400), '{"a":{}}', "null"),
    "without parameters": ({}, '{"a":1}', "null"),
}


@pytest.mark.parametrize("backend", ["auto", "automaton"])
@pytest.mark.parametrize("name", LENIENT)
def test_a_lenient_schema_is_held_as_far_as_it_can_be(
    compiler: GrammarCompiler, name: str, backend: Any
) -> None:
    schema, right, wrong = LENIENT[name]
    calls = [("<f>", tool_calls.arguments(schema)), ("<g>", tool_calls.arguments(WEATHER))]
    tag = tool_calls.among_text(calls, "<", ">")
    own = GrammarCompiler(compiler.vocabulary, config=ConstraintConfig(backend=backend))
    matcher = own.compile(structural_tag=tag).matcher()
    assert feed(own, matcher, f"a <f>{right}> b") and matcher.is_accepting()
    assert not feed(own, matcher, f"a <f>{wrong}>")
    assert feed(own, matcher, '<g>{"city":"Rom"}>') and not feed(own, matcher, '<g>{"days"')
    exact = tool_calls.among_text([("<f>", tool_calls.arguments(schema, True))], "<", ">")
    if schema:
        with pytest.raises(InvalidConstraint):
            own.compile(structural_tag=exact)
    opted_out = tool_calls.among_text([("<f>", tool_calls.arguments(schema, False))], "<", ">")
    assert feed(compiler, compiler.compile(structural_tag=opted_out).matcher(), '<f>{"é":[1]}>')


@pytest.mark.parametrize("given", ["dict", "Object", 5, ["objekt", "null"], None])
def test_arguments_are_an_object_where_their_schema_has_no_type(given: Any) -> None:
    """Nothing could be held of it: `arguments` was any JSON then, and the call was none."""
    properties = {"n": {"type": "integer"}}
    held = tool_calls.arguments({"type": given, "properties": properties})
    assert held["json_schema"] == {"type": "object", "properties": properties} and held["lenient"]
    strict = tool_calls.arguments({"type": given}, True)
    assert strict["json_schema"] == {"type": given}  # which is refused


def test_calls_or_json_of_other_forms(compiler: GrammarCompiler) -> None:
    def takes(text: str, **more: Any) -> bool:
        calls = [
            ("[F", tool_calls.arguments({"type": "object"}, True)),
            ("[G", tool_calls.arguments(True, True)),
        ]
        tag = tool_calls.or_json(calls, "]", {"type": "array"}, **{"last": True, **more})
        matcher = compiler.compile(structural_tag=tag).matcher()
        return feed(compiler, matcher, text) and matcher.is_accepting()

    assert takes("[F{}]") and takes("[G3]") and takes("[3]") and takes("[false]")
    assert not takes("[F{}]\n[G3]") and takes("[F{}]\n[G3]", last=False)
    assert takes("=[]", before="=") and not takes("[]", before="=")


def test_whitespace_of_islands(compiler: GrammarCompiler) -> None:
    text = '<function=weather>{"city": "Rom", "days": 3}</function>'
    assert feed(compiler, compiler.compile(structural_tag=TAGS).matcher(), text)
    compact = compiler.compile(structural_tag=TAGS, whitespace="compact")
    assert not feed(compiler, compact.matcher(), text)


def changed(**fields: Any) -> dict[str, Any]:
    return {**TAGS, **fields}


def structure(**fields: Any) -> dict[str, Any]:
    return changed(structures=[{**TAGS["structures"][0], **fields}], triggers=["<function="])


def untyped(tag: dict[str, Any], *path: str | int) -> dict[str, Any]:
    """`tag` without the `type` at `path`."""
    place: Any = tag
    for step in path:
        place = place[step]
    del place["type"]
    return tag


UNIQUE = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
FREE = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ""}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "or", "elements": elements}}


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("[", "not JSON"),
        ("[]", "Expected `object`, got `array`"),
        (changed(structures=[]), "structures: Expected `array` of length >= 1"),
        (changed(structures=[3]), r"structures\[0\]: Expected `object`, got `int`"),
        (structure(begin=""), r"structures\[0\]\.begin: Expected `str` of length >= 1"),
        (structure(begin=3), r"structures\[0\]\.begin"),
        (structure(end=None), r"structures\[0\]\.end: Expected `str`, got `null`"),
        (structure(schema=[]), r"structures\[0\]\.schema: Expected `bool \| object`, got `array`"),
        (structure(schema={"type": "no"}), r"structures\[0\]\.schema: .*type"),
        (structure(schema=False), r"structures\[0\]\.schema"),
        (structure(begin="<tool>"), r"structures\[0\]\.begin: '<tool>' starts with none"),
        (structure(schema={"type": "array", "uniqueItems": True}), r"structures\[0\].*uniqueItems"),
        (changed(triggers=["<function=", "[", "<y"]), "no tag begins with '<y'"),
        (changed(triggers=["<function=", "[", ""]), r"triggers\[2\]"),
        (changed(triggers="<"), "triggers: Expected `array`, got `str`"),
        (structure(begin="<function=\ud800>"), r"structures\[0\]\.begin: a lone surrogate"),
        (structure(end="\ud800"), r"structures\[0\]\.end: a lone surrogate"),
        (changed(triggers=["<function=", "[", "\udc00"]), r"triggers\[2\]: a lone surrogate"),
        (triggered(type="any_text"), "format.type"),
        (either(), r"format\.elements: Expected `array` of length >= 1"),
        (either({"type": "json"}), r"format\.elements\[0\]\.type"),
        (either(UNIQUE), r"format\.elements\[0\]\.json_schema: .*uniqueItems"),
        (either(FREE), r"format\.elements\[0\]\.end"),
        (either({"type": "const_string", "value": "\ud800"}), r"elements\[0\]\.value: a lone"),
        (untyped(triggered(), "format"), "format: .*missing required field `type`"),
        (
            untyped(triggered(), "format", "tags", 0, "content"),
            r"format\.tags\[0\]\.content: .*missing required field `type`",
        ),
        (triggered(excludes=["x"]), "format.excludes: is not supported"),
        (triggered(tags=[{"begin": "<t>", "end": ""}]), r"format\.tags\[0\]: .*`content`"),
        (triggered(at_least_one=1), r"format\.at_least_one"),
        (
            changed(
                structures=[
                    {"begin": "<a>", "schema": {}, "end": ""},
                    {"begin": "x<a>", "schema": {}, "end": ""},
                ],
                triggers=["<a", "x<a"],
            ),
            r"structures\[1\]\.begin: .*holds another trigger",
        ),
    ],
)
def test_what_is_wrong_is_named(compiler: GrammarCompiler, tag: Any, said: str) -> None:
    with pytest.raises(InvalidConstraint, match=said) as caught:
        compiler.compile(structural_tag=tag)
    assert str(caught.value).startswith("structural_tag: ")


def string(end: str = "\n</a>", **content: Any) -> dict[str, Any]:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "string", **content}, "end": end}
    return {"type": "structural_tag", "format": tag}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({}, ["", 'a"<\n</\n'], ["</a>", "x</a>y"]),
        ({"minLength": 1, "maxLength": 2}, ["é\n", "<"], ["", "abc", "\n\n\n"]),
        ({"maxLength": 500}, ["", "\n</b>" * 100], ["x" * 501]),
        ({"pattern": "^a+", "minLength": 2}, ["ab\n", "aa"], ["a", "ba"]),
        ({"enum": ["x", "x\n", "</a>"], "maxLength": 4}, ["x", "x\n"], ["", "</a>"]),
        ({"const": "x", "enum": ["x", "y"]}, ["x"], ["y"]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29", ""]),
        ({"pattern": "/", "format": "no such"}, ["a/b"], ["ab"]),
    ],
)
def test_the_text_of_a_string(
    compiler: GrammarCompiler, schema: Any, right: list[str], wrong: list[str]
) -> None:
    matcher = compiler.compile(structural_tag=string(json_schema=schema)).matcher()
    for text in right:
        assert feed(compiler, matcher, f"<a>{text}\n</a>") and matcher.is_accepting(), text
        assert not feed(compiler, matcher, f"<a>{text}\n</a>x")
    for text in wrong:
        taken = feed(compiler, matcher, f"<a>{text}\n</a>")
        assert not (taken and matcher.is_accepting()), text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": r"(a)\1"}, "#/pattern: no mask can hold"),
        ({"not": {}}, "#/not: "),
        ({"enum": ["</a>", 1]}, "#/enum: a text ends where it holds '</a>'"),
        ({"minLength": 2, "maxLength": 1}, "#"),
        ({"minLength": "a"}, "#/minLength"),
        ({"maxLength": 2001}, "#/maxLength: more than 2000 characters"),
    ],
)
def test_strings_that_cannot_be_held(compiler: GrammarCompiler, schema: Any, said: str) -> None:
    with pytest.raises(InvalidConstraint, match=said) as caught:
        compiler.compile(structural_tag=string(json_schema=schema))
    assert str(caught.value).startswith("structural_tag: format.content.json_schema: #")
    with pytest.raises(InvalidConstraint, match=r"format\.end: what ends a string is missing"):
        compiler.compile(structural_tag=string(" ", json_schema={}))
    lenient = string(json_schema=schema, lenient=True)
    least = weakest(Constraint("structural_tag", json.dumps(lenient)))
    assert least is not None
    for tag in (lenient, json.loads(least.source)):
        matcher = compiler.compile(structural_tag=tag).matcher()
        assert feed(compiler, matcher, "<a>any\n</a>") and matcher.is_accepting()
        assert not feed(compiler, matcher, "<a>any\n</a>x")


def test_overlapping_triggers(compiler: GrammarCompiler) -> None:
    tag = changed(
        structures=[
            {"begin": "<a>", "schema": {"type": "boolean"}, "end": "."},
            {"begin": "<ab>", "schema": {"type": "null"}, "end": "."},
        ],
        triggers=["<ab", "<a"],
    )
    matcher = compiler.compile(structural_tag=tag).matcher()
    assert feed(compiler, matcher, "<a>true.<ab>null.")
    assert not feed(compiler, matcher, "<ab>true")
    assert not feed(compiler, matcher, "<ax")
