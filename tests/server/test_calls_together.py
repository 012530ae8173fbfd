"""Several constrained calls in one answer, in each family's form."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from rootlace.language.tools import ToolCall, find_calls, tools
from rootlace.runtime.server.http.chat_request import (
    Tool,
    ToolChoice,
    calls_among_text,
    calls_or_format,
    forced_call,
)
from rootlace.runtime.server.http.constraints import Rule
from rootlace.runtime.server.tool_parsers.base import (
    DEEPSEEK,
    DEEPSEEK_31,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_BLANK,
    Answer,
    Call,
    Format,
)
from rootlace.runtime.server.tool_parsers.harmony import Harmony
from rootlace.runtime.server.tool_parsers.listing import tool_format
from rootlace.runtime.server.tool_parsers.tagged import Tagged
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Constraint, Part

TOOLS = [Tool(name, None, {"type": "object"}) for name in "fg"]
NAMES = {tool.name: tool.parameters for tool in TOOLS}
F, G = Call("f", '{"x":1}'), Call("g", "{}")

# Two calls in the chat templates of Qwen3, Mistral Nemo, Ministral 3, DeepSeek V3, DeepSeek V3.1
# and gpt-oss, in pieces: up to the first call's end, the second call, the end of both.
WRITTEN: dict[str, tuple[Format, tuple[str, str, str]]] = {
    "hermes": (
        Tagged(HERMES),
        (
            '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>',
            '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            "",
        ),
    ),
    "mistral": (
        Tagged(MISTRAL),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"x":1}}',
            ', {"name": "g", "arguments": {}}',
            "]",
        ),
    ),
    "mistral_blank": (
        Tagged(MISTRAL_BLANK),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x":1}}',
            ', {"name": "g", "arguments": {}}',
            "]",
        ),
    ),
    "mistral_args": (
        Tagged(MISTRAL_ARGS, ("[THINK]", "[/THINK]")),
        ('[TOOL_CALLS]f[ARGS]{"x":1}', "[TOOL_CALLS]g[ARGS]{}", ""),
    ),
    "deepseek": (
        Tagged(DEEPSEEK, ("<think>", "</think>")),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"x":1}\n```<｜tool▁call▁end｜>',
            "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_31": (
        Tagged(DEEPSEEK_31, ("<think>", "</think>")),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>',
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "harmony": (
        Harmony(),
        (
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}<|call|>',
            "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>"
            "{}<|call|>",
            "",
        ),
    ),
}


Whole = Callable[[str], bool | None]


def whole_of(compiler: GrammarCompiler, asked: Rule | Mapping[str, Any] | None) -> Whole:
    """Return whether an answer may end behind a text; None if no answer begins so."""
    tag = json.loads(asked.constraint.source) if isinstance(asked, Rule) else dict(asked or {})
    matcher = compiler.compile(structural_tag=tag).matcher()

    def whole(text: str) -> bool | None:
        matcher.reset()
        taken = all(matcher.advance(compiler.vocabulary.byte_tokens[b]) for b in text.encode())
        return matcher.is_accepting() if taken else None

    return whole


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("parallel", [None, False])
def test_beside_a_format(compiler: GrammarCompiler, family: str, parallel: bool | None) -> None:
    form, (first, second, end) = WRITTEN[family]
    asked = Rule(Constraint("json_schema", '{"type":"integer"}'), "response_format")
    choice = ToolChoice(parallel=parallel)
    whole = whole_of(compiler, calls_or_format(asked, choice, TOOLS, form))
    assert whole(first) is (not end) and whole(first + end)
    assert whole(form.answer_prefix("") + "12")
    several = parallel is None
    assert whole(first + second) is (not end if several else None)
    assert whole(first + second + end) is (True if several else None)
    assert whole(first + second + "12") is None

    parser = form.parser("", NAMES, True)
    text = first + second + end
    assert Answer.of([*parser.feed(text), *parser.finish()]) == Answer("", "", [F, G])


@pytest.mark.parametrize("family", WRITTEN)
def test_where_a_call_has_to_be_made(compiler: GrammarCompiler, family: str) -> None:
    form, (first, second, end) = WRITTEN[family]
    choice = ToolChoice("required", parallel=True)
    whole = whole_of(compiler, forced_call(choice, TOOLS, form, {})[1])
    assert whole(first) is (not end) and whole(first + end)
    assert whole(first + second + end)
    assert whole("so " + first) is whole(first + end + " so") is None


@pytest.mark.parametrize("strict", [True, None, False])
@pytest.mark.parametrize("family", WRITTEN)
def test_in_free_text(compiler: GrammarCompiler, family: str, strict: bool | None) -> None:
    """A second call, too, must satisfy its tool's parameters."""
    form, (first, second, end) = WRITTEN[family]
    number = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools = [Tool("f", None, {"type": "object"}), Tool("g", None, number, strict=strict)]
    whole = whole_of(compiler, calls_among_text(tools, form, {}))
    assert whole("so") and whole("so " + first + end + " so")
    right = second.replace("{}", '{"x":2}')
    assert whole(first + right + end) and whole(first + right + end + " so")
    assert whole(first + second + end) is (True if strict is False else None)
    assert whole("so " + form.begin("h")) is None
    if (alone := form.begin_alone("f")) is not None:  # `around` may be left out
        text = "so " + alone[1] + '{"x":1}' + form.end
        assert whole(text) and whole(text.replace(alone[1], form.begin_alone("h")[1])) is None
        parser = form.parser("", NAMES, True)
        assert Answer.of([*parser.feed(text), *parser.finish()]).calls == [F]


CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 3},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
OFFERED = {"get_weather": CITY, "now": None, "get": {"properties": {"x": {"const": 1}}}}


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("family", WRITTEN)
def test_whatever_a_model_would_write(
    compiler: GrammarCompiler, family: str, strict: bool | None
) -> None:
    """Behind a call's tag, allowed bytes are drawn at random."""
    form, random = WRITTEN[family][0], Random(family)
    tools = [Tool(name, None, given, strict) for name, given in OFFERED.items()]
    tools[2] = Tool("get", None, OFFERED["get"], None if strict is None else False)
    matcher = compiler.compile(
        structural_tag=json.loads(calls_among_text(tools, form, {}).constraint.source)
    ).matcher()
    tags = [form.trigger if not form.around[0] else form.around[0]]
    tags += [alone[0] for alone in [form.begin_alone("now")] if alone is not None]
    seen = set()
    for count in range(12):
        matcher.reset()
        text = ("so " + tags[count % len(tags)]).encode()
        assert all(matcher.advance(compiler.vocabulary.byte_tokens[byte]) for byte in text)
        while not matcher.is_accepting():
            allowed = np.flatnonzero(matcher.allowed_mask())
            # Objects without a bound have an end, too.
            close = compiler.vocabulary.byte_tokens[ord("}")]
            token = close if close in allowed else int(random.choice(allowed))
            assert matcher.advance(token)
            text += bytes([compiler.vocabulary.token_bytes[token][0]])
        parser = form.parser("", OFFERED, True)
        found = Answer.of([*parser.feed(text.decode(errors="replace")), *parser.finish()])
        assert found.content == "so" and found.calls, text
        for call in found.calls:
            seen.add(call.name)
            schema = OFFERED[call.name] or {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert len(seen) > 1


def test_calls_without_a_tag(compiler: GrammarCompiler) -> None:
    """A call of Llama 3 may be text; it is constrained with a strict tool or behind a tag."""
    form = Tagged(LLAMA3)
    lenient = whole_of(compiler, calls_among_text(TOOLS, form, {}))
    assert lenient('{"name": "Bob", "parameters": 1}') and lenient(
        '{"name": "f", "parameters": {}}'
    )
    assert lenient('<|python_tag|>{"name": "f", "parameters": {}} so')
    assert lenient('<|python_tag|>{"name": "h') is lenient("<|python_tag|>f(") is None
    strict = [*TOOLS, Tool("s", None, None, strict=True)]
    held = whole_of(compiler, calls_among_text(strict, form, {}))
    assert held("so") and held('so {"name": "s", "parameters": {}} so')
    assert held('{"name": "Bob') is held('{"name": "s", "parameters": {"x') is None
    assert held('<|python_tag|>{"name": "s", "parameters": {}}')
    assert held('<|python_tag|>{"name": "s", "parameters": {"x') is None

    choice = ToolChoice("required", parallel=True)
    both = '{"name": "f", "parameters": {"x":1}};{"name": "g", "parameters": {}}'
    assert whole_of(compiler, forced_call(choice, TOOLS, form, {})[1])(both)
    parser = form.parser("", NAMES, True)
    assert Answer.of([*parser.feed(both), *parser.finish()]) == Answer("", "", [F, G])


class NoTemplate:
    def render(self, *_: object, **__: object) -> tuple[Part, ...]:
        raise InvalidRequest("there is none")


@pytest.mark.parametrize("family", WRITTEN)
def test_of_programs(compiler: GrammarCompiler, family: str) -> None:
    """Programs' calls are constrained and found as over HTTP, and other text is not."""
    form, (first, second, end) = WRITTEN[family]

    def f(x: int) -> None: ...

    def g() -> None: ...

    written = tool_format(NoTemplate(), form)
    whole = whole_of(compiler, tools(f, g).constrain(written, "auto"))
    text = "so " + first + second + end + ' {"name": "f", "arguments": {}}'
    assert whole(text) and whole(text.replace('{"x":1}', '{"y":1}')) is None
    assert whole("so " + first + second.replace("{}", "[]") + end) is None
    assert list(find_calls(text, written, tools(f, g))) == [
        ToolCall("f", {"x": 1}),
        ToolCall("g", {}),
    ]
    one = whole_of(compiler, tools(f, g).constrain(written, "required"))
    assert one(first + end) and not one(first + second + end)
