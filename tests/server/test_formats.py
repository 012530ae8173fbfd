"""Answers parsed into content, thoughts and calls, however the text is cut into pieces."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.http.chat_request import Blocks, End, blocks_of
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
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Format,
    JsonEnd,
    Reasoning,
)
from rootlace.runtime.server.tool_parsers.harmony import Harmony
from rootlace.runtime.server.tool_parsers.learnt import format_of
from rootlace.runtime.server.tool_parsers.tagged import Tagged

CALL = '<tool_call>{"name":"f","arguments":{"x":1e3}}</tool_call>'
FOUND = Call("f", '{"x":1e3}')
G = Call("g", '{"y": "}{ \\" </tool_call>"}')
TOOLS = {"f": None, "g": None}
THINK = ("<think>", "</think>")

FORMATS: dict[str, Format] = {
    "hermes": Tagged(HERMES, THINK),
    "llama3": Tagged(LLAMA3),
    "mistral": Tagged(MISTRAL),
    "mistral_args": Tagged(MISTRAL_ARGS, ("[THINK]", "[/THINK]")),
    "deepseek": Tagged(DEEPSEEK, THINK),
    "deepseek_31": Tagged(DEEPSEEK_31, THINK),
    "harmony": Harmony(),
}


def read(
    form: Format, pieces: list[str], prompt_end: str = "", reasoning: bool = True
) -> list[Delta]:
    parser = form.parser(prompt_end, TOOLS, reasoning)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def answer(form: Format, text: str, prompt_end: str = "", reasoning: bool = True) -> Answer:
    """Parse the answer, which must be the same in one piece and character by character."""
    whole = Answer.of(read(form, [text], prompt_end, reasoning))
    assert Answer.of(read(form, list(text), prompt_end, reasoning)) == whole
    return whole


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("plain <b> text", "plain <b> text", []),
        (CALL, "", [FOUND]),
        (f"a {CALL}\n{CALL} b", "a b", [FOUND, FOUND]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ('<tool_call>{"name":3}</tool_call>', '<tool_call>{"name":3}</tool_call>', []),
        ('<tool_call>{"name":"f","arguments":{"x":1e3}}', "", [FOUND]),  # stopped at its tag
        ('<tool_call>{"name":"f"', '<tool_call>{"name":"f"', []),
        ('<tool_call>{"name":"f","arguments":"{\\"x\\":1e3}"}</tool_call>', "", [FOUND]),
        ('<tool_call>{"arguments":{"x":1e3},"name":"f"}</tool_call>', "", [FOUND]),
        ('<tool_call>{"name":"f","arguments":{"x":1e3},"id":"}"}</tool_call>', "", [FOUND]),
        ('<tool_call>{"name":"f"}</tool_call>', "", [Call("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":{"x"', "", [Call("f", '{"x"')]),  # cut off
        ("ends in <tool_", "ends in <tool_", []),
        ("<think>\nsecret\n</think>\n\nsaid", "said", []),
    ],
)
def test_hermes(text: str, content: str, calls: list[Call]) -> None:
    found = answer(FORMATS["hermes"], text)
    assert (found.content, found.calls) == (content, calls)


OBJECT = '{"name":"f","arguments":{"x":1e3}}'


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (OBJECT, "", [FOUND]),
        (f"```json\n{OBJECT}\n```", "", [FOUND]),
        (f"\n```\n{OBJECT}\n```\nThat is all.", "That is all.", [FOUND]),
        (f"```json\n{OBJECT}\n```\n```json\n{OBJECT}\n```", "", [FOUND, FOUND]),
        (f"<think>\na\n</think>\n\n```json\n{OBJECT}\n```", "", [FOUND]),
        (f"```json\n{OBJECT[:30]}", "", [Call("f", OBJECT[24:30])]),  # cut off
        (f"As JSON: ```json\n{OBJECT}\n```", f"As JSON: ```json\n{OBJECT}\n```", []),
        *(
            (text, text, [])
            for text in (
                OBJECT.replace('"f"', '"not offered"'),
                f"```json\n{OBJECT.replace('f', 'not offered')}\n```",
                '```json\n{"a": 1}\n```',
                "```python\nf({})\n```",
                "```",
                "```js",
                "```json\n ",
                "`f` it is",
            )
        ),
    ],
)
def test_calls_without_tags(text: str, content: str, calls: list[Call]) -> None:
    """Calls as Markdown, which Qwen2.5-Coder writes, or as bare JSON. They begin the answer, and
    name offered tools."""
    found = answer(FORMATS["hermes"], text)
    assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_json_for_the_user_streams(name: str) -> None:
    """Text that is no call is given as soon as its first key is known."""
    parser = FORMATS[name].parser("", TOOLS, True)
    assert parser.feed('{"answer": "Os') == [Content('{"answer"'), Content(': "Os')]


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama3", '{"name": "f", "parameters": {"x":1e3}}; {"name": "g", "parameters": %}'),
        ("llama3", '<|python_tag|>{"name":"f","parameters":{"x":1e3}};{"name":"g","parameters":%}'),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"x":1e3}}, {"name": "g", "arguments": %}]',
        ),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"x":1e3}[TOOL_CALLS]g[CALL_ID]a1b2[ARGS]%'),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"x":1e3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
            "```json\n%\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "deepseek_31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x":1e3}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>%<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"x":1e3}<|call|><|start|>assistant to=functions.g<|channel|>commentary json'
            "<|message|>%<|call|>",
        ),
    ],
)
def test_two_calls_of_each_format(name: str, text: str) -> None:
    found = answer(FORMATS[name], text.replace("%", G.arguments))
    assert (found.content, found.calls) == ("", [FOUND, G])


@pytest.mark.parametrize("name", ["llama3", "mistral", "deepseek", "harmony"])
@pytest.mark.parametrize("text", ["hello {} there", "[TOOL", '{"a": 1} is JSON', "<｜tool"])
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert answer(FORMATS[name], text) == Answer(text)


@pytest.mark.parametrize("name, form", FORMATS.items())
def test_what_is_forced_is_read(name: str, form: Format) -> None:
    """A call begun for the model, with the arguments that a schema forces."""
    text = form.begin("f") + '{"x":1e3}' + form.end
    assert answer(form, text).calls == [FOUND]
    assert form.begin("f").startswith(form.trigger)


F, G_CALL = Call("f", '{"a":1}'), Call("g", "{}")
H_G = '<tool_call>\n{"name":"g","arguments":{}}\n</tool_call>'
CUT = '{"a":1\n'


@pytest.mark.parametrize(
    "name, text, content, calls",
    [
        (
            *("hermes", f'<tool_call>{{"name":"f","arguments":{{"a":1}}\n</tool_call>\n{H_G}\nb'),
            *("b", [F, G_CALL]),
        ),
        ("hermes", f'<tool_call>{{"name":"f","arguments":{{"a":1}}{H_G}b', "b", [F, G_CALL]),
        (
            *("hermes", f'<tool_call>{{"name":"f","arguments":{CUT}</tool_call>b{H_G}'),
            *("b", [Call("f", CUT), G_CALL]),
        ),
        (
            *("hermes", f'<tool_call>{{"name":"f","arguments":{{"a":1}} oops " b\n{H_G}'),
            *('oops " b', [F, G_CALL]),
        ),
        (
            "hermes",
            f'<tool_call>{{"x":[</tool_call>{H_G}',
            '<tool_call>{"x":[</tool_call>',
            [G_CALL],
        ),
        (
            *("hermes", '<tool_call>{"name":"f","arguments":{"a":1}, "said in a string'),
            *(', "said in a string', [F]),
        ),
        (
            *("mistral", '[TOOL_CALLS][{"name":"f","arguments":{"a":1},'),
            *(",", [F]),
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name":"f","arguments":{"a":1}, {"name":"g","arguments":{}}] b ]',
            "b ]",
            [F, G_CALL],
        ),
        (
            *("llama3", '{"name":"f","parameters":{"a":1}; {"name":"g","parameters":{}}'),
            *("", [F, G_CALL]),
        ),
    ],
)
def test_a_missing_brace_loses_nothing(
    name: str, text: str, content: str, calls: list[Call]
) -> None:
    found = answer(FORMATS[name], text)
    assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice"}',
        '{"name": "Alice", "age": 3}',
        '{"name": "Alice", "parameters": {"a": 1}}',
        '{"name": "f", "age": 3}',
        '{"parameters": {"a": 1}, "name": "Alice"}',
        '{"name": "\\q", "parameters": {}}',
    ],
)
def test_an_object_without_a_tag_must_call_an_offered_tool(text: str) -> None:
    assert answer(FORMATS["llama3"], text) == Answer(text)
    call = '{"name":"f","parameters":{"a":1}}'
    assert answer(FORMATS["llama3"], f"{call}; {text}") == Answer("; " + text, "", [F])


def test_tagged_calls() -> None:
    """A call of an unknown tool with arguments is a call: the client reports the error."""
    unknown = '<tool_call>{"name":"x","arguments":{"a":1}}</tool_call>'
    assert answer(FORMATS["hermes"], unknown).calls == [Call("x", '{"a":1}')]
    person = '<tool_call>{"name":"Alice","age":3}</tool_call>'
    assert answer(FORMATS["hermes"], person) == Answer(person)
    bad = '<tool_call>{"name":"\\q","arguments":{}}</tool_call>'
    assert answer(FORMATS["hermes"], bad) == Answer(bad)


@pytest.mark.parametrize(
    "name, rest",
    [
        *[(name, "```py\nx```") for name in sorted(FORMATS) if name != "llama3"],
        ("mistral", "] text"),
        ("mistral", ", and so on"),
        ("mistral_args", "] text"),
        ("hermes", "</tool_call>"),
    ],
)
def test_tags_behind_a_call_end_it_once(name: str, rest: str) -> None:
    form = FORMATS[name]
    found = answer(form, form.begin("f") + '{"a":1}' + form.end + rest)
    assert (found.content, found.calls) == (rest, [F])


def test_a_fence_that_no_call_opened_is_content() -> None:
    text = '<｜tool▁call▁begin｜>{"name":"f","arguments":{"a":1}}<｜tool▁call▁end｜>```py'
    for source in (text, text.replace("<｜tool▁call▁end｜>", "")):
        assert answer(FORMATS["deepseek"], source) == Answer("```py", "", [F])


@pytest.mark.parametrize(
    "text, content",
    [
        ("plain <|x answer", "plain <|x answer"),
        ("<|channel|>final<|message|>a<|end|>b", "ab"),
        ("<|channel|>final<|message|>a<|return|>b <|x", "ab <|x"),
        ("said<|channel|>final<|message|>b<|end|>", "saidb"),
        ("<|channel|>final<|message|>a <|start|> b <|end|>", "a <|start|> b "),
        ("some text<|end|><|start|>assistant<|channel|>final<|message|>b", "some textb"),
        ("long " * 200 + "<|start|>assistant<|channel|>final<|message|>b", "long " * 200 + "b"),
        ("<|start|>assistant<|channel|>fin", ""),
    ],
)
def test_text_outside_harmonys_messages_is_content(text: str, content: str) -> None:
    assert answer(FORMATS["harmony"], text) == Answer(content)


def test_thoughts() -> None:
    hermes, harmony = FORMATS["hermes"], FORMATS["harmony"]
    said = Answer("said", "secret <tool_call>", [])
    text = "secret <tool_call>\n</think>\n\nsaid"
    assert answer(hermes, text, prompt_end="<|im_start|>assistant\n<think>\n") == said
    assert answer(hermes, "<think>" + text) == said
    assert answer(hermes, "<think>a</think>b", reasoning=False).content == "<think>a</think>b"
    assert answer(hermes, "not <think>at the start</think>").reasoning == ""
    assert hermes.leave_thoughts("<think>\n") == "\n</think>\n\n"
    text = (
        "<|channel|>analysis<|message|>secret <tool_call><|end|>"
        "<|start|>assistant<|channel|>final<|message|>said"
    )
    assert answer(harmony, text) == said
    assert answer(harmony, "said", prompt_end=harmony.answer_prefix("")) == Answer("said")


def test_calls_come_as_they_are_written() -> None:
    deltas = read(FORMATS["hermes"], list('a<tool_call>{"name":"f","arguments":{"x":1}}'))
    assert deltas[0] == Content("a")
    assert deltas[1] == CallBegin("f")
    assert deltas[2:] == [CallArguments(char) for char in '{"x":1}']


PIECES = st.sampled_from(
    [
        *("a", "<", "<tool", CALL, "<tool_call>", "</tool_call>", "{}", "\n", "é", ";", ","),
        *("<think>", "</think>", "[TOOL_CALLS]", '[{"name": "f", "arguments": {', "}}]"),
        *("<|message|>", "<|end|>"),
    ]
)


@given(st.sampled_from(sorted(FORMATS)), st.lists(PIECES, max_size=12).map("".join), st.data())
def test_any_chunking_gives_the_same(name: str, text: str, data: st.DataObject) -> None:
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert merged(read(FORMATS[name], pieces)) == merged(read(FORMATS[name], [text]))


WORDS = st.sampled_from(
    [
        *("%", " % ", "\n", "{", "}", '"', "'", "[", "]", ";", ",", "\\", "```", " "),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"),
        *('{"name": "f", "arguments": {', '{"name": "%", "parameters": {"a": "%"}}'),
        *('{"arguments": {"a": "%"}, "name": "f"}', "[TOOL_CALLS]", "[{", "f[ARGS]{", "; {"),
        *("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json\n{", "f<｜tool▁sep｜>{"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|python_tag|>", "<|x", "<|return|>"),
        *("<|start|>assistant", "<|channel|>final", "<|channel|>analysis", "<|message|>"),
        *("<|channel|>commentary to=functions.f ", "<|constrain|>json", "<|end|>", "<|call|>"),
    ]
)


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(WORDS, max_size=14).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_no_word_is_lost(name: str, text: str, sizes: list[int]) -> None:
    """Every word appears once, in its place: in content, a thought or a call."""
    template = text.split("%")
    words = [f" w{i}w " for i in range(len(template) - 1)]
    text = "".join(a + b for a, b in zip(template, [*words, ""], strict=True))
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    deltas = read(FORMATS[name], pieces)
    found = " ".join(
        delta.name if isinstance(delta, CallBegin) else delta.text for delta in merged(deltas)
    )
    whole_calls = '"arguments": {"a": "'  # the arguments may precede the name
    expected = [word.strip() for word in words]
    assert sorted(re.findall(r"w\d+w", found)) == sorted(expected)
    if whole_calls not in text:
        assert re.findall(r"w\d+w", found) == expected
    blocks = Blocks()
    events = [event for delta in deltas for event in blocks.take([delta])] + blocks.finish()
    streamed = [event.block for event in events if isinstance(event, End)]
    assert blocks_of(Answer.of(read(FORMATS[name], [text]))) == streamed


LONG = 8_000


@pytest.mark.parametrize("name, form", FORMATS.items())
@pytest.mark.parametrize(
    "text",
    [
        '{"answer": "' + "x" * LONG + '"}',
        "%" + '{"arguments": {"t": "' + "x" * LONG + '"}, "name": "f"}',
        "%" + '{"name": "' + "x" * LONG,
        "%" + '{"name":"f","arguments":{},"x":"' + "x" * LONG,
        "%" + " " * LONG,
        " " * LONG + "x",
        "<think>" + "\n" * LONG,
        "%" * (LONG // 8),
        "x" * LONG,
    ],
    ids=range(9),
)
def test_the_work_is_linear(
    name: str, form: Format, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the characters searched for the end of JSON, and those that a parser keeps to search
    again with the next piece."""
    searched = 0
    feed = JsonEnd.feed

    def counted(self: JsonEnd, text: str) -> int:
        nonlocal searched
        searched += len(text)
        return feed(self, text)

    monkeypatch.setattr(JsonEnd, "feed", counted)
    text = text.replace("%", form.trigger.partition('{"name')[0])[: LONG + 100]
    parser = form.parser("", TOOLS, True)
    for at in range(0, len(text), 4):
        parser.feed(text[at : at + 4])
        assert len(parser._buffer) <= 600  # type: ignore[attr-defined]
    parser.finish()
    assert searched <= 3 * len(text) + 150 * 600


def merged(deltas: list[Delta]) -> list[Delta]:
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, Content | Reasoning | CallArguments) and type(last) is type(delta):
            found[-1] = type(delta)(last.text + delta.text)  # type: ignore[union-attr]
        else:
            found.append(delta)
    return found


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.data())
def test_where_json_ends(value: object, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    cut = data.draw(st.integers(0, len(text) - 1))
    end = JsonEnd()
    assert end.feed(text[:cut]) == cut and not end.ended
    assert end.feed(text[cut:] + "} tail") == len(text) - cut and end.closed


@pytest.mark.parametrize(
    "source, expected",
    [
        ("<|start|>assistant<|channel|>final<|message|>", Harmony()),
        ('{"name": {{ x }}, "parameters": y} <|python_tag|> ipython', Tagged(LLAMA3)),
        ("[TOOL_CALLS] [", Tagged(MISTRAL_BLANK)),
        ("[TOOL_CALLS][", Tagged(MISTRAL)),
        ("[TOOL_CALLS]{{ name }}[ARGS] [THINK] [/THINK]", FORMATS["mistral_args"]),
        ("<｜tool▁call▁begin｜> ```json </think>", FORMATS["deepseek"]),
        ("<｜tool▁call▁begin｜> </think>", FORMATS["deepseek_31"]),
        ("<tool_call> and </think>", Tagged(HERMES, THINK)),
        ("nothing of the kind", Tagged(HERMES)),
    ],
)
def test_the_template_tells_the_format(source: str, expected: Format) -> None:
    template = ChatTemplate("{# " + source.replace("{{", "").replace("}}", "") + " #}")
    assert format_of(template) == expected
