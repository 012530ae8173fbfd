"""Calls with arguments in separate tags: found, read and constrained by schemas."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

import rootlace as rl
from rootlace.language.tools import ToolCall, find_calls, run_call
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.http.chat_request import (
    Tool,
    ToolChoice,
    calls_among_text,
    calls_or_format,
    forced_call,
)
from rootlace.runtime.server.http.constraints import Rule
from rootlace.runtime.server.tool_parsers import tagged_arguments as tagged_parser
from rootlace.runtime.server.tool_parsers.base import (
    Answer,
    Call,
    CallArguments,
    CallBegin,
    Delta,
    JsonEnd,
)
from rootlace.runtime.server.tool_parsers.learnt import format_of
from rootlace.runtime.server.tool_parsers.listing import ToolPrompt
from rootlace.runtime.server.tool_parsers.tagged_arguments import TaggedArguments
from rootlace.runtime.structured import GrammarCompiler
from rootlace.types import tagged_arguments
from rootlace.types.tagged_arguments import is_json
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint, Text
from tests.server.test_formats import merged

QWEN = """{% for tool in tools or () %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for tool_call in message.tool_calls or () %}
{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for args_name, args_value in tool_call.arguments | items %}
{{- '<parameter=' + args_name + '>\\n' }}
{%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence
  and args_value is not string) else args_value | string %}
{{- args_value }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# 'tool' #}"""
"""Writes calls as Qwen3-Coder's and Qwen3.5's do: numbers and constants as Python does."""

GLM = """[gMASK]<sop>{% for tool in tools or () %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}<|{{ m.role }}|>
{{ m.content or '' }}{% if m.tool_calls %}
{% for tc in m.tool_calls %}{%- set tc = tc.function %}
{{ '\\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# 'tool' <think></think> #}"""
"""Writes calls as that of GLM 4.5 does."""

GLM_COMPACT = GLM.replace("{{ '\\n<tool_call>' + tc.name }}\n", "{{- '<tool_call>' + tc.name -}}\n")
GLM_COMPACT = GLM_COMPACT.replace("</arg_key>\n", "</arg_key>").replace(
    "items() %}\n", "items() %}"
)
GLM_COMPACT = GLM_COMPACT.replace("</arg_value>\n{% endfor %}\n", "</arg_value>{% endfor %}")
"""As GLM 4.7's: without line breaks."""

GROUPED = """{% for tool in tools or () %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}]~b]{{ message.role }}
{{ message.content or '' }}{% if message.tool_calls %}
<minimax:tool_call>
{% for one in message.tool_calls %}<invoke name="{{ one.function.name }}">
{% for key, value in one.function.arguments.items() %}<parameter name="{{ key }}">
{{- value | tojson(ensure_ascii=False) if value is not string else value }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% endfor %}{% if add_generation_prompt %}]~b]assistant
{% endif %}{# 'tool' #}"""
"""Writes calls as MiniMax M2's does: those of an answer stand together in one tag."""

BARE = """{% for tool in tools or () %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for one in message.tool_calls or () %}
<function name="{{ one.function.name }}">{% for key, value in one.function.arguments.items() %}
{{- '<param name="' + key + '">' }}
{{- value | tojson(ensure_ascii=False) if value is not string else value }}</param>
{%- endfor %}</function>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# 'tool' #}"""
"""Writes calls as MiniCPM 5's does: with no tag around them."""

MARKED = BARE.replace(
    "string else value }}",
    "string else '<![CDATA[' ~ value ~ ']]>' if '<' in value or '\\n' in value else value }}",
)
"""As MiniCPM 5's, also in that texts which look like tags are marked as texts."""

HUNYUAN = GROUPED.replace("<minimax:tool_call>", "<tool_calls:a>")
for _old, _new in {
    "</minimax:tool_call>": "</tool_calls:a>",
    '<invoke name="{{ one.function.name }}">': "<tool_call:a>{{ one.function.name }}<tool_sep:a>",
    "</invoke>": "</tool_call:a>",
    '<parameter name="{{ key }}">': "<arg_key:a>{{ key }}</arg_key:a><arg_value:a>",
    "</parameter>": "</arg_value:a>",
}.items():
    HUNYUAN = HUNYUAN.replace(_old, _new)
"""As Hunyuan 3's: a tag stands between name and arguments."""

SEED = QWEN.replace("tool_call>", "seed:tool_call>").replace(
    "args_name + '>\\n'", "args_name + '>'"
)
SEED = SEED.replace("'\\n</parameter>", "'</parameter>")
"""As Seed-OSS's: Qwen3-Coder's with another tag, and without the line breaks around values."""

SOURCES = {
    "qwen": QWEN,
    "glm": GLM,
    "glm_compact": GLM_COMPACT,
    "grouped": GROUPED,
    "bare": BARE,
    "marked": MARKED,
    "hunyuan": HUNYUAN,
    "seed": SEED,
}
TEMPLATES = {_name: ChatTemplate(_source) for _name, _source in SOURCES.items()}
FORMS: dict[str, TaggedArguments] = {}
for _name, _template in TEMPLATES.items():
    _found = format_of(_template)
    assert isinstance(_found, TaggedArguments), _name
    FORMS[_name] = _found

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Some text."},
        "count": {"type": "integer"},
        "items": {"type": "array"},
        "nested": {"$ref": "#/$defs/Nested"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"oneOf": [{"type": "null"}, {"type": "string"}]},
        "few": {"enum": ["1", "2"]},
        "flag": {"type": "boolean"},
        "ratio": {"type": ["number", "null"]},
    },
    "$defs": {"Nested": {"type": "object"}},
}
SCHEMAS: dict[str, Any] = {"f": PARAMETERS, "g": None}
PROGRAM_TOOLS = rl.tools(
    rl.Tool("f", "", PARAMETERS, json.loads), rl.Tool("g", "", {"type": "object"}, json.loads)
)


def read(form: TaggedArguments, pieces: list[str]) -> list[Delta]:
    parser = form.parser("", SCHEMAS, True)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def answer(form: TaggedArguments, text: str) -> Answer:
    """Parse the answer, which must be the same in one piece and character by character."""
    whole = Answer.of(read(form, [text]))
    assert Answer.of(read(form, list(text))) == whole
    return whole


def written(form: TaggedArguments, name: str, *arguments: tuple[str, str]) -> str:
    """Write a call with these keys and texts."""
    texts = [form.argument.written(key, text) for key, text in arguments]
    return form.begin(name) + "".join(texts) + form.end


def several(form: TaggedArguments, *texts: str) -> str:
    """Join calls in one answer."""
    first, apart, behind = form.around
    each = [text.removeprefix(first).removesuffix(behind) for text in texts]
    return f"{first}{apart.join(each)}{behind}"


# Found --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_the_form(name: str) -> None:
    prompt = ToolPrompt(TEMPLATES[name])
    assert prompt.reads and prompt.calls and not prompt.encodes
    assert (FORMS[name].think is not None) is name.startswith("glm")
    assert prompt.listed.argument == FORMS[name].argument
    assert written(FORMS[name], "the_name", ("argument", "value")) in prompt.listed.after
    assert "JSON" not in prompt.listed.after


def test_how_calls_are_written() -> None:
    arguments = (("a", "1"), ("b", "x"))
    assert written(FORMS["qwen"], "f", *arguments) == (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert written(FORMS["glm"], "f", *arguments) == (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    )
    assert written(FORMS["glm_compact"], "f", *arguments) == (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>x</arg_value></tool_call>"
    )


# Read ---------------------------------------------------------------------------------------------

WORDS = [
    "a",
    "é",
    '"',
    "\\",
    "\n",
    "\r\n",
    " ",
    "<",
    ">",
    "</",
    "</parameter",
    "{",
    "]",
    "null",
    "1",
]
TAGS = ["<tool_call>", "</tool_call>", "</function>", "<parameter=x>", "<arg_key>", "</arg_key>"]
CLOSES = tuple(sorted({form.argument.close for form in FORMS.values()}))
TEXTS = st.lists(st.sampled_from(WORDS + TAGS), max_size=8).map("".join)
TEXTS = TEXTS.filter(lambda text: not any(close in text for close in CLOSES))
# Values other than texts may contain closing tags.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.sampled_from(CLOSES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(),
        "items": st.lists(JSON, max_size=3),
        "nested": st.dictionaries(TEXTS, JSON, max_size=3),
        "maybe": TEXTS.filter(lambda text: text != "null"),
        "flag": st.booleans(),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    },
)


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("key", ["text", "maybe", "unknown"])
@pytest.mark.parametrize("value", ["\n", "\n\n", "a\n", "a \r\n", " ", "\n<\n"])
def test_lines_of_a_text_are_its_own(name: str, key: str, value: str) -> None:
    form, function = FORMS[name], {"name": "f", "arguments": {key: value}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    parts = TEMPLATES[name].render([message], add_generation_prompt=False)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    text = text[text.index(form.trigger) : text.index(form.end) + len(form.end)]
    for at in range(len(text)):
        (call,) = Answer.of(read(form, [text[:at], text[at:]])).calls
        assert json.loads(call.arguments) == {key: value}, at


@given(st.sampled_from(sorted(FORMS)), ARGUMENTS, TEXTS, st.data())
def test_what_a_template_writes_is_read(
    name: str, arguments: dict[str, Any], said: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    said = said.replace(form.trigger, "").strip()
    functions = [{"name": "f", "arguments": arguments}, {"name": "g", "arguments": {}}]
    calls = [{"type": "function", "function": function} for function in functions]
    message = {"role": "assistant", "content": said, "tool_calls": calls}
    parts = TEMPLATES[name].render([message], add_generation_prompt=False)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    text = text.partition("assistant")[2].removeprefix("|>").removesuffix("<|im_end|>\n")
    text = text.removesuffix("[e~[\n")
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    deltas = read(form, pieces)
    found = Answer.of(deltas)
    assert found.content == said and [call.name for call in found.calls] == ["f", "g"]
    assert json.loads(found.calls[0].arguments) == arguments and found.calls[1].arguments == "{}"
    assert merged(deltas) == merged(read(form, [text]))
    listed = ToolPrompt(TEMPLATES[name]).listed
    of_programs = [ToolCall("f", arguments), ToolCall("g", {})]
    assert list(find_calls(text, listed, PROGRAM_TOOLS)) == of_programs


@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(
        st.sampled_from(
            [
                *(*WORDS, *TAGS, *CLOSES, "<function=f>", "<parameter=text>", "f", "count", "%"),
                *("<parameter=items>\n%", "<tool_call>f<arg_key>", "</arg_key><arg_value>%"),
                *("<tool_call><function=f><parameter=items>", '<parameter=text>"%', "<arg_key>%"),
                *("<parameter=%", "<tool_call>f<arg_key>items</arg_key><arg_value>", '["%'),
            ]
        ),
        max_size=14,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_no_word_is_lost(name: str, parts: list[str], sizes: list[int]) -> None:
    """Each word (%) appears once and in its place, however the text is cut."""
    text = "".join(part.replace("%", f" w{i}w ") for i, part in enumerate(parts))
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    deltas = merged(read(FORMS[name], pieces))
    assert deltas == merged(read(FORMS[name], [text]))
    found = " ".join(delta.name if isinstance(delta, CallBegin) else delta.text for delta in deltas)
    assert re.findall(r"w\d+w", found) == re.findall(r"w\d+w", text)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "1", "1"),
        ("text", " a\n", " a\n"),
        ("count", "1", 1),
        ("count", " 1 ", 1),
        ("count", "many", "many"),
        ("items", "[1, 'a\"]", "[1, 'a\"]"),
        ("items", "", ""),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "null", None),
        ("either", "1.10", "1.10"),
        ("few", "1", "1"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("ratio", "None", None),
        ("items", "[1, {'x': 'y\"'}, None]", [1, {"x": 'y"'}, None]),
        ("nested", "{'x': (1,)}", {"x": [1]}),
        ("items", "[1, b'x']", "[1, b'x']"),
        ("items", "[" * 300 + "'x'" + "]" * 300, "[" * 300 + "'x'" + "]" * 300),
        ("text", "['x']", "['x']"),
        ("unknown", "['x']", "['x']"),
        ("ratio", "NaN", "NaN"),
        ("unknown", "5", 5),
        ("unknown", '{"a": [1.50]}', {"a": [1.5]}),
        ("unknown", '"a', '"a'),
        ("unknown", "<b>", "<b>"),
    ],
)
def test_values(name: str, key: str, text: str, value: Any) -> None:
    form = FORMS[name]
    found = answer(form, written(form, "f", (key, text), ("text", "x")))
    (call,) = found.calls
    expected = {key: value} if key == "text" else {key: value, "text": "x"}
    if key != "text":
        assert json.loads(call.arguments) == expected
    else:
        assert json.loads(call.arguments, object_pairs_hook=list)[0] == ("text", value)


@pytest.mark.parametrize("name", FORMS)
def test_calls_and_text(name: str) -> None:
    form = FORMS[name]
    f, g, h = (written(form, "f", ("count", "1.50")), written(form, "g"), written(form, "h"))
    called = [Call("f", '{"count": 1.50}'), Call("g", "{}")]
    assert answer(form, f"a {f}\n{g} b") == Answer("a b", "", called)
    assert answer(form, h).calls == [Call("h", "{}")]  # the tag shows that it is a call
    tag = form.calls.begin
    if tag.endswith(">"):
        hermes = f'{tag}\n{{"name": "f", "arguments": {{"x": "</parameter>"}}}}\n{form.end}'
        assert answer(form, hermes).calls == [Call("f", '{"x": "</parameter>"}')]
    for text in (tag, f"{tag}no call{form.calls.ends[-1]}", f"{tag[:5]} <function=f> </function>"):
        assert answer(form, text) == Answer(text)
    # A name is no JSON, however it is cut.
    for text in (f'{tag}{{"x":1}}{form.end}', f'{tag}{{"x":1}}{written(form, "g")}'):
        assert answer(form, text).calls == called[1:] * text.count(form.begin("g"))
    # Calls without the end of the arguments, and without arguments.
    if len(form.calls.ends) > 1:
        assert answer(form, f.replace(form.calls.ends[0], "")).calls == called[:1]
    forgotten = answer(form, written(form, "g").removesuffix(form.end) + form.end.strip() + " so")
    assert (forgotten.content, forgotten.calls) == ("so", called[1:])


@pytest.mark.parametrize("name", FORMS)
def test_calls_that_are_cut_stay_open(name: str) -> None:
    form = FORMS[name]
    text = written(form, "f", ("text", 'a"\n'), ("items", '["</parameter>", 1]'), ("count", "12"))
    begun = text.index(form.argument.opening)
    given = '{"text": "a\\"\\n", "items": ["</parameter>", 1], "count": 12}'
    for end in range(len(text)):
        found = answer(form, text[:end])
        if not found.calls:
            content = text[:end]
            for tag in form.calls.noise:
                content = content.removeprefix(tag).lstrip() if content.startswith(tag) else content
            assert end < begun + len(form.argument.opening) and found.content == content
            continue
        arguments = found.calls[0].arguments
        if end < len(text) - len(form.end):
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
        elif arguments.endswith("}"):
            assert arguments == given
        else:
            assert arguments + "}" == given


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("key", ["text", "maybe", "items", "unknown"])
def test_texts_that_are_marked(name: str, key: str) -> None:
    """Texts are unmarked only if the template marks texts, and the mark is whole."""
    form = FORMS[name]
    for text, inner in (("<![CDATA[ a\n<b>]]]]>", " a\n<b>]]"), ("<![CDATA[]]>", "")):
        call = written(form, "f", (key, text))
        expected = {key: inner if name == "marked" else text}
        assert json.loads(answer(form, call).calls[0].arguments) == expected
        (found,) = find_calls(call, ToolPrompt(TEMPLATES[name]).listed, PROGRAM_TOOLS)
        assert found.arguments == expected
    for text in ("<![CDATA[a", "a]]>", "a <![CDATA[b]]>"):
        call = written(form, "f", (key, text))
        assert json.loads(answer(form, call).calls[0].arguments) == {key: text}


def test_texts_come_as_they_are_written() -> None:
    for form in FORMS.values():
        if form.argument.cdata:
            continue  # its beginning does not tell the type
        deltas = read(form, list(written(form, "f", ("text", "x" * 50), ("count", "12"))))
        assert deltas[0] == CallBegin("f") and deltas.count(CallArguments("x")) == 50


def test_a_quote_that_is_never_closed_costs_one_value() -> None:
    """Such a value is no JSON: it ends at the first closing tag, also if the answer ends before."""
    for form in FORMS.values():
        text = written(form, "f", ("items", '["a]'), ("count", "1"), ("text", "b")) * 2
        found = answer(form, text).calls
        expected = {"items": '["a]', "count": 1, "text": "b"}
        assert [json.loads(call.arguments) for call in found] == [expected] * 2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("text", ["x", "<", '"', "\n", "[", "</", "%"])
def test_the_work_is_linear(name: str, text: str) -> None:
    form = FORMS[name]
    for key in ("text", "items", "unknown"):
        begun = written(form, "f", (key, "%")).partition("%")[0]
        parser = form.parser("", SCHEMAS, True)
        long = begun + text.replace("%", begun) * 8_000
        for at in range(0, 40_000, 4):
            parser.feed(long[at : at + 4])
            assert len(parser._buffer) <= 600
        parser.finish()


@pytest.mark.parametrize("name", FORMS)
def test_values_that_are_no_json_are_read_twice_at_most(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its quotes, each of these values extends to the end of the answer."""
    form, looked_at = FORMS[name], 0

    class Counting(JsonEnd):
        def feed(self, text: str) -> int:
            nonlocal looked_at
            looked_at += len(text)
            return super().feed(text)

    monkeypatch.setattr(tagged_parser, "JsonEnd", Counting)
    for end in (written(form, "f", ("items", '"')), ""):
        text = written(form, "f", ("items", '\\"')) * 100 + end
        looked_at = 0
        calls = answer(form, text).calls
        assert [call.arguments for call in calls[:100]] == ['{"items": "\\\\\\""}'] * 100
        assert looked_at < 6 * len(text)  # as a whole, and character by character
        if end:
            assert calls[100:] == [Call("f", '{"items": "\\""}')]


def test_programs_read_values_that_are_no_json_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    schema = {"type": "object", "additionalProperties": {"type": "array"}}
    items = rl.tools(rl.Tool("f", "", schema, json.loads))

    def counting(text: str) -> bool:
        nonlocal looked_at
        looked_at += len(text)
        return is_json(text)

    monkeypatch.setattr(tagged_arguments, "is_json", counting)
    for name, form in FORMS.items():
        listed, closes = ToolPrompt(TEMPLATES[name]).listed, form.argument.close * 100
        for value in ('\\"', f'["{closes}"]'):
            text = written(form, "f", *[(f"items{i}", value) for i in range(20)], ("items", value))
            looked_at = 0
            (call,) = find_calls(text, listed, items)
            assert call.arguments["items"] == (value if value[0] == "\\" else [closes])
            assert len(call.arguments) == 21 and looked_at <= len(text)


# Held ---------------------------------------------------------------------------------------------

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 3},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["c", "c\n", "cf"]},
        "code": {"anyOf": [{"type": "string", "pattern": "^[a<]\n*$"}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/Where"},
        "date": {"type": "string", "format": "date"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "Where": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 14}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
OFFERED = [Tool("get", None, STRICT, True), Tool("now"), Tool("any", None, {"type": "object"})]


def takes(compiler: GrammarCompiler, asked: Rule, text: str) -> bool:
    """Return whether a text is a complete answer."""
    tag = json.loads(asked.constraint.source)
    matcher = compiler.compile(structural_tag=tag).matcher()
    taken = all(matcher.advance(compiler.vocabulary.byte_tokens[b]) for b in text.encode())
    return taken and matcher.is_accepting()


CITY, UNIT = ("city", "a<b"), ("unit", "c")
RIGHT = [
    ("get", CITY, UNIT),
    ("get", ("city", ""), ("unit", "c\n")),
    ("get", CITY, ("days", "14"), ("unit", "cf"), ("code", "null"), ("date", "2024-02-29")),
    ("get", CITY, UNIT, ("code", "a\n\n"), ("where", '{"name": "</arg_value>"}')),
    ("now",),
    ("any",),
    ("any", ("what", "ever</b>"), ("x", "5")),
]
WRONG = [
    ("get", UNIT),
    ("get", UNIT, CITY),
    ("get", ("city", "abcd"), UNIT),
    ("get", CITY, ("days", "15"), UNIT),
    ("get", CITY, ("unit", "f")),
    ("get", CITY, UNIT, ("code", "b")),
    ("get", CITY, UNIT, ("code", "\n")),
    ("get", CITY, UNIT, ("where", "Rome")),
    ("get", CITY, UNIT, ("date", "2024-02-30")),
    ("get", CITY, UNIT, ("more", "1")),
    ("now", ("x", "1")),
    ("later",),
]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_held(compiler: GrammarCompiler, name: str) -> None:
    form = FORMS[name]
    begun, forced = forced_call(ToolChoice("required"), OFFERED, form, {})
    together = forced_call(ToolChoice("required", parallel=True), OFFERED, form, {})[1]
    one = forced_call(ToolChoice("required", "get"), OFFERED, form, {})[1]
    among = calls_among_text(OFFERED, form, {})
    either = calls_or_format(
        Rule(Constraint("json_schema", '{"type":"integer"}'), "response_format"),
        ToolChoice(),
        OFFERED,
        form,
    )
    assert not begun
    for call in RIGHT:
        text = written(form, *call)  # type: ignore[arg-type]
        assert takes(compiler, forced, text) and takes(compiler, among, f"so {text} so"), text
        assert takes(compiler, one, text) is (call[0] == "get")
        twice = several(form, text, text)
        assert not takes(compiler, forced, twice) and not takes(compiler, forced, "so")
        assert takes(compiler, together, twice) and takes(compiler, either, text)
    for call in WRONG:
        text = written(form, *call)  # type: ignore[arg-type]
        for asked in (forced, together, among, either):
            assert not takes(compiler, asked, text), text
    assert takes(compiler, among, "so") and takes(compiler, either, form.answer_prefix("") + "12")


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("name", FORMS)
def test_whatever_a_model_would_write(
    compiler: GrammarCompiler, name: str, strict: bool | None
) -> None:
    """Allowed bytes are drawn at random, with a preference for those that end a text."""
    form, random = FORMS[name], Random(name)
    tools = [Tool("get", None, STRICT, strict), Tool("now", None, None, strict)]
    tag = json.loads(forced_call(ToolChoice("required"), tools, form, {})[1].constraint.source)
    matcher = compiler.compile(structural_tag=tag).matcher()
    schemas = {tool.name: tool.parameters for tool in tools}
    lengths = set()
    for _ in range(25):
        matcher.reset()
        text = bytearray()
        while not matcher.is_accepting():
            allowed = np.flatnonzero(matcher.allowed_mask())
            token = int(random.choice(allowed))
            assert matcher.advance(token)
            text += bytes([compiler.vocabulary.token_bytes[token][0]])
        parser = form.parser("", schemas, True)
        found = Answer.of([*parser.feed(text.decode(errors="replace")), *parser.finish()])
        assert not found.content and len(found.calls) == 1, text
        call = found.calls[0]
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schemas[call.name] or {"maxProperties": 0})
        lengths.add(len(arguments))
    assert len(lengths) > 2


@dataclass
class Where:
    name: str


def test_programs_hold_and_read_the_same(compiler: GrammarCompiler) -> None:
    """Every drawn text is a call of the function, with arguments of its types."""
    called: list[Any] = []

    def get(
        days: Annotated[int, Meta(ge=1, le=14)],
        unit: Literal["c", "c\n", "f"],
        code: Annotated[str, Meta(max_length=3)] | None,
        where: Where,
    ) -> str:
        called.append((days, unit, code, where))
        return "done"

    tools = rl.tools(get)
    for name, template in TEMPLATES.items():
        listed, random = ToolPrompt(template).listed, Random(name)
        tag = tools.constrain(listed, "required")
        assert tag is not None
        matcher = compiler.compile(structural_tag=tag).matcher()
        for _ in range(10):
            matcher.reset()
            text = bytearray()
            while not matcher.is_accepting():
                token = int(random.choice(np.flatnonzero(matcher.allowed_mask())))
                assert matcher.advance(token)
                text += bytes([compiler.vocabulary.token_bytes[token][0]])
            (call,) = find_calls(text.decode(errors="replace"), listed, tools)
            assert run_call(call, tools, None).result == "done", text
            days, unit, code, where = called.pop()
            assert type(days) is int and 1 <= days <= 14 and unit in ("c", "c\n", "f")
            assert (code is None or len(code) <= 3) and type(where.name) is str
        cut = FORMS[name].begin("get") + FORMS[name].argument.opening + "days"
        (call,) = find_calls(cut, listed, tools)
        assert str(call.error) == "the call has no end"
        begun = written(FORMS[name], "get", ("days", "%")).partition("%")[0]
        (call,) = find_calls(f"{begun}1", listed, tools)
        assert str(call.error) == "the argument 'days' has no end"


def test_a_call_in_a_text_that_is_cut_is_text() -> None:
    for name, form in FORMS.items():
        begun = written(form, "f", ("text", "%")).partition("%")[0]
        inner = form.begin("g") + form.end
        (call,) = find_calls(
            f"{begun}So: {inner} and", ToolPrompt(TEMPLATES[name]).listed, PROGRAM_TOOLS
        )
        assert call.name == "f" and str(call.error) == "the argument 'text' has no end"


UNHELD: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "not": {"const": "x"}}, "#/not"),
    ({"type": "string", "pattern": r"(a)\1"}, "#/pattern"),
    ({"enum": ["a" + "".join(CLOSES)]}, "#/enum"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
]


@pytest.mark.parametrize(("schema", "place"), UNHELD)
def test_what_cannot_be_held(compiler: GrammarCompiler, schema: Any, place: str) -> None:
    """A schema is refused with a strict tool, and the argument is free otherwise."""
    parameters = {"properties": {"x": schema}, "required": ["x"]}
    for form in FORMS.values():
        lenient = calls_among_text([Tool("f", None, parameters)], form, {})
        assert takes(compiler, lenient, written(form, "f", ("x", "[1]")))
        strict = calls_among_text([Tool("now"), Tool("f", None, parameters, True)], form, {})
        with pytest.raises(InvalidConstraint, match=place) as caught:
            takes(compiler, strict, "")
        assert strict.with_tool(str(caught.value)).startswith(f"tool 'f': json_schema: {place}")


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"minProperties": 1}, "#/minProperties"),
        ({"anyOf": [{"required": ["x"]}]}, "#/anyOf"),
        ({"patternProperties": {"^x": {"type": "string"}}}, "#/patternProperties"),
        ({"properties": {"a>b": {}}}, "#/properties: the name 'a>b'"),
        ({"properties": ["x"]}, "#/properties: it is malformed"),
        (
            {"properties": {}, "additionalProperties": {"type": "integer"}},
            "#/additionalProperties",
        ),
    ],
)
def test_what_is_said_of_all_arguments(compiler: GrammarCompiler, more: Any, place: str) -> None:
    parameters = {"properties": {"x": {"type": "integer"}}, **more}
    for form in FORMS.values():
        assert takes(
            compiler,
            calls_among_text([Tool("f", None, parameters)], form, {}),
            written(form, "f", *([("x", "1")] if "properties" not in more else [])),
        )
        with pytest.raises(InvalidConstraint, match=f"tool 'f': json_schema: {place}"):
            calls_among_text([Tool("f", None, parameters, True)], form, {})
