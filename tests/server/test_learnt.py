"""The form of a model's calls, learnt from its chat template's text of made-up calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rootlace as rl
from rootlace.language.tools import ToolCall, find_calls
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.http.chat_request import (
    Tool,
    ToolChoice,
    calls_among_text,
    forced_call,
)
from rootlace.runtime.server.http.constraints import Rule
from rootlace.runtime.server.tool_parsers.base import HERMES, LLAMA3, Answer, Call
from rootlace.runtime.server.tool_parsers.learnt import format_of
from rootlace.runtime.server.tool_parsers.listing import ToolPrompt
from rootlace.runtime.server.tool_parsers.tagged import Tagged
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.protocol import Text


def source_of(first: str, one: str, apart: str, behind: str, plain: str = "TEXT") -> str:
    """Make a template that writes calls so: `one` with NAME, ARGUMENTS and a NUMBER."""
    call = one.replace("NAME", "{{ c.function.name }}").replace("NUMBER", "{{ loop.index0 }}")
    call = call.replace("ARGUMENTS", "{{ c.function.arguments | tojson(ensure_ascii=False) }}")
    before, after = plain.split("TEXT")
    return (
        "{% for tool in tools or () %}{{ tool | tojson }}\n{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.tool_calls %}{{ m.content }}"
        f"{first}{{% for c in m.tool_calls %}}{call}"
        f"{{% if not loop.last %}}{apart}{{% endif %}}{{% endfor %}}{behind}"
        f"{{% else %}}{before}{{{{ m.content }}}}{after}{{% endif %}}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}{# 'tool' #}"
    )


OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
COHERE = '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}'
KIMI = "<|call|>functions.NAME:NUMBER<|arguments|>ARGUMENTS<|/call|>"
SOURCES = {
    "apriel": source_of("<tool_calls>[", OBJECT, ", ", "]</tool_calls>"),
    "nemotron": source_of("<TOOLCALL>[", OBJECT, ", ", "]</TOOLCALL><|eot|>"),
    "cohere": source_of(
        "<|THINK|><|/THINK|><|ACTION|>[\n    ",
        COHERE,
        ",\n    ",
        "\n]<|/ACTION|>",
        "<|A|>TEXT<|/A|>",
    ),
    "apertus": source_of("<|tools_prefix|>[", '{"NAME": ARGUMENTS}', ", ", "]<|tools_suffix|>"),
    "gigachat": source_of("", f"<|function_call|>{OBJECT}", "", ""),
    "kimi": source_of("<|section|>", KIMI, "", "<|/section|>"),
    "compact": source_of("", f"<tool_call>{OBJECT}</tool_call>", "", ""),
    "lines": source_of("", "<call>NAME\n<args>ARGUMENTS</args></call>", "\n", ""),
    "blanks": source_of("", "<call><name> NAME </name>ARGUMENTS</call>", "", ""),
}
ESCAPED = '<call name="NAME">{% for k, v in c.function.arguments.items() %}'
ESCAPED += '<p k="{{ k }}">{{ v | e }}</p>{% endfor %}</call>'
TAGS = "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</a>{% endfor %}"
TEMPLATES = {name: ChatTemplate(source) for name, source in SOURCES.items()}
FORMS = {name: format_of(template) for name, template in TEMPLATES.items()}
SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "g": {"type": "object"},
}
OFFERED = [Tool(name, None, schema) for name, schema in SCHEMAS.items()]
OF_PROGRAMS = rl.tools(*(rl.Tool(name, "", schema, json.loads) for name, schema in SCHEMAS.items()))
TEXTS = st.text('ab"\\{}[]<>,:\n é', max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(TEXTS, JSON, max_size=3)


def answer_of(name: str, said: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return the answer as the template writes it."""
    functions = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    message = {"role": "assistant", "content": said, "tool_calls": functions}
    parts = TEMPLATES[name].render([message], add_generation_prompt=False)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    text = text.removeprefix("<|assistant|>").removesuffix("<|end|>").removesuffix("<|eot|>")
    return text.replace("<|THINK|><|/THINK|>", "")


@pytest.mark.parametrize("name", SOURCES)
def test_it_is_learnt(name: str) -> None:
    prompt, form = ToolPrompt(TEMPLATES[name]), FORMS[name]
    assert prompt.reads and prompt.calls and form.calls is not HERMES
    text = answer_of(name, "", ("the_name", {"argument": "value"}))
    assert text == f'{form.begin("the_name")}{{"argument": "value"}}{form.end}'
    assert text in prompt.listed.after
    assert text.startswith(form.trigger)


@given(
    st.sampled_from(sorted(SOURCES)),
    st.lists(
        st.tuples(st.sampled_from("fgh"), st.dictionaries(TEXTS, JSON, max_size=3)), max_size=3
    ),
    st.sampled_from(["", "So: [1]"]),
)
def test_what_a_template_writes_is_read(
    name: str, calls: list[tuple[str, dict[str, Any]]], said: str
) -> None:
    form = FORMS[name]
    text = answer_of(name, said, *calls) if calls else said
    found = []
    for pieces in ([text], list(text)):
        parser = form.parser("", SCHEMAS, True)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        found.append(Answer.of(deltas))
    assert found[0] == found[1] and found[0].content == said
    read = [(call.name, json.loads(call.arguments)) for call in found[0].calls]
    assert read == calls
    listed = ToolPrompt(TEMPLATES[name]).listed
    if name not in ("cohere", "kimi"):  # programs count no calls
        assert list(find_calls(text, listed, OF_PROGRAMS)) == [ToolCall(*call) for call in calls]


def test_a_name_ends_where_its_text_first_may() -> None:
    """A model may leave out blanks; text that looks like another name is in the arguments."""
    arguments = '{"x":{"tool_name":"y","parameters":{"z":{}}}}'
    for name in ("apertus", "cohere"):
        text = answer_of(name, "", ("f", json.loads(arguments)))
        text = text.replace(" ", "")
        for pieces in ([text], list(text)):
            parser = FORMS[name].parser("", SCHEMAS, True)
            deltas = [delta for piece in pieces for delta in parser.feed(piece)]
            found = Answer.of(deltas + parser.finish())
            assert (found.content, found.calls) == ("", [Call("f", arguments)])


@pytest.mark.parametrize(
    "source",
    [
        source_of("", "<tool_call>NAME\nARGUMENTS</tool_call>", "\n", ""),
        source_of("", '<tool_call>{"tool": "NAME", "args": ARGUMENTS}</tool_call>', "\n", ""),
        source_of("<tool_call>[", OBJECT, ", ", "]</tool_call>"),
    ],
)
def test_a_forced_call_behind_the_tag_of_hermes(source: str) -> None:
    """Text begun for the model is always part of a call, whatever follows the tag."""
    form = format_of(ChatTemplate(source))
    for tools in (OFFERED, OFFERED[:1]):
        begun, asked = forced_call(ToolChoice("required"), tools, form, {})
        written = "".join(text.text for text in begun)
        assert f"{form.begin('f')}{{}}{form.end}".startswith(written)
        assert bool(written) is (len(tools) == 1)
        assert asked.constraint.kind == ("json_schema" if written else "structural_tag")


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_held(compiler: GrammarCompiler, name: str) -> None:
    form = FORMS[name]

    def takes(asked: Rule, text: str) -> bool:
        tag = json.loads(asked.constraint.source)
        matcher = compiler.compile(structural_tag=tag).matcher()
        taken = all(matcher.advance(compiler.vocabulary.byte_tokens[b]) for b in text.encode())
        return taken and matcher.is_accepting()

    choice = ToolChoice("required", parallel=True)
    forced = forced_call(choice, OFFERED, form, {})[1]
    among = calls_among_text(OFFERED, form, {})
    text = answer_of(name, "", ("f", {"x": 1}))
    assert takes(forced, text) and takes(among, f"so {text} so") and takes(among, "so")
    assert not takes(forced, "so")
    for wrong in (("f", {"x": "1"}), ("h", {"x": 1})):
        assert not takes(forced, answer_of(name, "", wrong))
        assert not takes(among, answer_of(name, "", wrong))
    if name not in ("cohere", "kimi"):
        assert takes(forced, answer_of(name, "", ("f", {"x": 1}), ("g", {})))


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        # A tag on every answer, an id before the name, no tag, arguments that are not JSON.
        (source_of("", f"<|role|>call\n{OBJECT}", "", "", "<|role|>TEXT"), HERMES),
        (source_of("", "<|id|>{{ c.id }}<|name|>NAME<|a|>ARGUMENTS<|/a|>", "", ""), HERMES),
        (source_of("", OBJECT, "\n", ""), HERMES),
        (source_of("", OBJECT, "\n", "") + "{# <|python_tag|> #}", LLAMA3),
        (source_of("<tools>", "NAME(1)", ", ", "</tools>"), HERMES),
        # Objects in a tag, without a mark where one ends.
        (source_of("<tool_calls>\n", OBJECT, "\n", "\n</tool_calls>"), HERMES),
        # Forms that the parser cannot read: an object in an object, fences, numbers in tags, text
        # between calls or behind them, arguments without an end, HTML escapes.
        (source_of("", f'<call>{{"function": {OBJECT}}}</call>', "", ""), HERMES),
        (source_of("", "<call>NAME\n```json\nARGUMENTS\n```</call>", "", ""), HERMES),
        (source_of("", '<call id="NUMBER" name="NAME">ARGUMENTS</call>', "", ""), HERMES),
        (source_of("<calls>", "<call>NAME<a>ARGUMENTS</a></call>", ",", "</calls>"), HERMES),
        (source_of("", '<call name="NAME" args=ARGUMENTS/>', "", ""), HERMES),
        (source_of("", f"<call>NAME{TAGS}", "", ""), HERMES),
        (source_of("", ESCAPED, "", ""), HERMES),
    ],
)
def test_what_says_too_little(source: str, calls: object) -> None:
    assert format_of(ChatTemplate(source)).calls is calls


@pytest.mark.parametrize("thoughts", ["<think></think>", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("calls", ["m.tool_calls", "m.tool_calls[:1]"])
def test_thoughts_before_calls_are_no_part_of_these(thoughts: str, calls: str) -> None:
    """Holds also where only answers with calls have thoughts, and where an answer has one call."""
    for one in (KIMI, f"<tool_call>{OBJECT}</tool_call>"):
        plain = source_of("", one, "", "").replace("in m.tool_calls", f"in {calls}")
        form = format_of(ChatTemplate(plain.replace("{{ m.content }}", thoughts, 1)))
        assert form.calls.opening == one.partition("NAME")[0] and not form.calls.noise
        assert form.calls.around[0] == ""


@pytest.mark.parametrize(
    ("before", "behind", "expected"),
    [
        ("<seed:think>", "</seed:think>\n", ("<seed:think>", "</seed:think>")),
        ("<think:a>\n", "\n</think:a>", ("<think:a>", "</think:a>")),
        ("<think>", "</think>", ("<think>", "</think>")),
        ("<|think|>", "<|end|><|content|>", None),
        ("Thoughts: ", "\n", None),
    ],
)
def test_thoughts_are_learnt(before: str, behind: str, expected: tuple[str, str] | None) -> None:
    thought = (
        f"{{% if m.reasoning_content %}}{before}{{{{ m.reasoning_content }}}}{behind}{{% endif %}}"
    )
    source = (
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{thought}{{{{ m.content }}}}{{% endfor %}}"
    )
    form = format_of(ChatTemplate(source))
    assert isinstance(form, Tagged) and form.think == expected
    if expected is not None:
        parser = form.parser("", {}, True)
        deltas = parser.feed(f"{before}Hm.{behind}Yes.") + parser.finish()
        assert Answer.of(deltas) == Answer("Yes.", "Hm.")
