"""The format of calls and thoughts that a chat template shows.

The template writes an answer of one made-up call, and one of two. Here Apriel's:

    <tool_calls>[  {"name": "  NAME  ", "arguments":   {...}  }  ]</tool_calls>
    first          begin             between                 end  behind

    <tool_calls>[  {"name": "NAME", "arguments": {...}}  ,      {"name": "OTHER", "arguments": ...
                                                         apart

Arguments are one JSON text, or each stands in tags of its own (`tagged_arguments`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.tool_parsers.base import (
    DEEPSEEK,
    DEEPSEEK_31,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_BLANK,
    Answer,
    Calls,
    Format,
)
from rootlace.runtime.server.tool_parsers.harmony import Harmony
from rootlace.runtime.server.tool_parsers.tagged import OBJECT, Tagged
from rootlace.runtime.server.tool_parsers.tagged_arguments import TaggedArguments
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Text
from rootlace.wire.tool_calls import Argument

_THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def format_of(template: ChatTemplate) -> Format:
    """Return the format of the template's earlier answers; Hermes's if it shows none."""
    source = template.source or ""
    if "<|channel|>" in source and "<|message|>" in source:
        return Harmony()
    think = next((tags for tags in _THINK if tags[1] in source), None) or _thoughts(template)
    known = _known(source)
    found = Tagged(known, think) if known is not None else _learnt(template, think)
    if found is not None:
        return found
    llama = HERMES.begin not in source and ("<|python_tag|>" in source or "ipython" in source)
    return Tagged(LLAMA3 if llama else HERMES, think)


def _known(source: str) -> Calls | None:
    """Return calls of a family whose models or templates write them in more than one way."""
    if "<｜tool▁call▁begin｜>" in source:
        return DEEPSEEK if "```json" in source else DEEPSEEK_31
    if "[TOOL_CALLS]" not in source:
        return None
    if "[ARGS]" in source:
        return MISTRAL_ARGS
    return MISTRAL_BLANK if "[TOOL_CALLS] [" in source else MISTRAL


# Write --------------------------------------------------------------------------------------------


NAME, _OTHER_NAME = "probe_the_name", "probe_another"
ASKED = {"role": "user", "content": "?"}
_THOUGHT, _ANSWER, _ID = "probe the thought", "probe the answer", "probe0000"

Message = dict[str, Any]


def rendered(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: list[Message] | None = None,
    generate: bool = True,
) -> str:
    """Render the messages; "" if the template refuses them."""
    try:
        parts = template.render([*messages], tools=tools, add_generation_prompt=generate)
    except InvalidRequest:
        return ""
    return "".join(part.text for part in parts if isinstance(part, Text))


def calling(arguments: Any, *names: str) -> Message:
    """Return an answer that calls each of these tools."""
    functions = [{"name": name, "arguments": arguments} for name in names]
    calls = [{"id": _ID, "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _answer(
    template: ChatTemplate, message: Message, around: tuple[str, str], think: tuple[str, str] | None
) -> str:
    """Return an answer without thoughts, and without the texts around every answer."""
    text = rendered(template, [ASKED, message], generate=False)
    before, after = around
    begin = _whole_tags(text, _shared(text, before))
    end = len(text) - _shared(text[begin:][::-1], after[::-1])
    if text.rfind("<", begin, end) > text.rfind(">", begin, end):
        end = text.find(">", end) + 1
    found = text[begin:end]
    return (found if think is None else found.rpartition(think[1])[2]).strip()


def _shared(one: str, other: str) -> int:
    """Count the characters that both texts begin with; all digits count as equal."""
    size = 0
    for a, b in zip(one, other, strict=False):
        if a != b and not (a.isdecimal() and b.isdecimal()):
            break
        size += 1
    return size


def _whole_tags(text: str, at: int) -> int:
    """Return the place `at`, or the beginning of the tag around it."""
    begin = text.rfind("<", 0, at)
    return begin if begin > text.rfind(">", 0, at) else at


# Read ---------------------------------------------------------------------------------------------


def _thoughts(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the tags around thoughts, where only such tags separate thoughts and answer."""
    message = {"content": _ANSWER, "reasoning_content": _THOUGHT, "reasoning": _THOUGHT}
    text = rendered(template, [ASKED, {"role": "assistant", **message}], generate=False)
    match = re.search(rf"(<[^<>/]+>)\s*{_THOUGHT}\s*(</[^<>]+>)\s*{_ANSWER}", text)
    return (match[1], match[2]) if match is not None else None


_ARGUMENTS = {"probe_a": "probe the value", "probe_b": 12}
_FORMS = (
    r"""\{ \s* "probe_a" \s* : \s* "probe\ the\ value" \s* ,
    \s* "probe_b" \s* : \s* 12 \s* \}""",
    r"""
    (?P<opening> < [^<]*? ) probe_a (?P<between> .*? ) probe\ the\ value
    (?P<gap> \s* ) (?P<close> < [^<>]+ > ) (?P<after> \s* )
    (?P=opening) probe_b (?P=between) 12 (?P=gap) (?P=close) (?P=after)
    """,
)
"""Patterns of `_ARGUMENTS` as JSON, or each in tags of its own."""
_MARKED = "<probe> &\n"
"""Text that some templates mark within tags."""
_TAG = re.compile(r"<[^<>]*>")
_NAME_CHARACTERS = 128


class _Parts(NamedTuple):
    """Parts of a call, as drawn at the top of the file."""

    first: str
    begin: str
    between: str
    end: str
    apart: str
    behind: str


def _learnt(template: ChatTemplate, think: tuple[str, str] | None) -> Tagged | None:
    """Return the format that parses the template's own calls; None if no format does."""
    message = {"role": "assistant", "content": _ANSWER}
    before, found, after = rendered(template, [ASKED, message], generate=False).partition(_ANSWER)
    arguments: Any = _ARGUMENTS
    one = _answer(template, calling(arguments, NAME), (before, after), think) if found else ""
    if found and NAME not in one:
        arguments = json.dumps(_ARGUMENTS)
        one = _answer(template, calling(arguments, NAME), (before, after), think)
    if one.count(NAME) != 1 or _ID in one:
        return None
    two = _answer(template, calling(arguments, NAME, _OTHER_NAME), (before, after), think)
    for form in _FORMS:
        match = re.search(form, one, re.DOTALL | re.VERBOSE)
        if match is None or NAME not in one[: match.start()]:
            continue
        parts = _parts(one, two, match)
        argument = msgspec.convert(match.groupdict(), Argument) if match.groupdict() else None
        calls = None if parts is None else _calls(parts, argument)
        # A tag of every answer says nothing of calls.
        if calls is None or calls.begin in before + after:
            continue
        learnt = Tagged(calls, think)
        if argument is not None:
            marked = calling({"probe_a": _MARKED}, NAME)
            text = rendered(template, [ASKED, marked], generate=False)
            if _MARKED.strip() not in text:
                continue  # the value is escaped as HTML
            cdata = f"<![CDATA[{_MARKED}]]>{argument.gap}{argument.close}" in text
            argument = msgspec.structs.replace(argument, cdata=cdata)
            learnt = TaggedArguments(calls, think, argument=argument)
        if _reads(learnt, one) and _reads(learnt, two):
            return learnt
    return None


def _reads(form: Tagged, text: str) -> bool:
    """Return whether the parser finds the template's calls, and no text behind them."""
    names = [name for name in (NAME, _OTHER_NAME) if name in text]
    parser = form.parser("", dict.fromkeys(names), False)
    begin, end = text.find(form.calls.opening), text.rfind(form.end) + len(form.end)
    found = Answer.of([*parser.feed(text[begin:end]), *parser.finish()])
    if found.content or [call.name for call in found.calls] != names:
        return False
    try:
        return all(json.loads(call.arguments) == _ARGUMENTS for call in found.calls)
    except ValueError:  # nothing says where they end
        return False


def _parts(one: str, two: str, match: re.Match[str]) -> _Parts | None:
    """Split an answer of one call, whose arguments are `match`, as one of two calls shows it."""
    before, _, between = one[: match.start()].partition(NAME)
    behind, call = one[match.end() :], one[: match.end()]
    others, found, _ = two.removeprefix(call).partition(_OTHER_NAME)
    if not found or not two.startswith(call):  # the template writes one call at most
        return _Parts("", before, between, _tags(behind, before.count("<")), "\n", "")
    size = _shared(before[::-1], others[::-1])
    begins = [at for mark in "<{" if (at := before.find(mark, len(before) - size)) >= 0]
    if not begins:
        return None
    first, begin = before[: min(begins)], before[min(begins) :]
    others = others[: len(others) - len(begin)]
    end = behind[: _shared(others, behind)]
    end = end[: _whole_tags(end, len(end))]
    apart, behind = others[len(end) :], behind[len(end) :]
    tags = list(_TAG.finditer(first))
    if tags:
        first = first[tags[-1].start() :]  # without thoughts
    return _Parts(first, begin, between, end, apart, _tags(behind, min(len(tags), 1)))


def _tags(text: str, count: int) -> str:
    """Cut the text behind `count` tags, before the tags that end the answer."""
    tags = list(_TAG.finditer(text))
    return text if len(tags) <= count else text[: tags[count].start()].rstrip()


def _calls(parts: _Parts, argument: Argument | None) -> Calls | None:
    """Return calls in the parsers' notation; None where nothing separates a call from text."""
    first, begin, between, end, apart, behind = parts
    array, tags = first.rstrip().endswith("["), tuple(_TAG.findall(end + behind))
    noise, at = tuple(_TAG.findall(first)), begin.find("{")
    if at >= 0:  # a call is an object, which may stand in an array
        match = _TAG.match(first + begin)
        if match is None or array != bool(first):
            return None
        if (first + begin[:at])[match.end() :].strip() != "[" * array:
            return None
        tag, head, noise = match[0], begin[at:], ()
    else:
        match = _TAG.match(begin)
        tag = begin.rstrip() if match is None else match[0]
        head = begin[len(tag) :]
        if not tag.startswith("<"):
            return None
    header = None
    if not OBJECT.match(f"{head}{NAME}{between}{{"):
        follows = [r"\{"]
        if argument is not None:
            follows = [re.escape(one) for one in (argument.opening, *tags[:1])]
        header = re.compile(
            rf"\s{{0,8}}{_loosely(head.lstrip())}(?P<name>[^\s<>{{}}\"]{{1,{_NAME_CHARACTERS}}}?)"
            rf"{_loosely(between.rstrip())}\s{{0,8}}(?={'|'.join(follows)})"
        )
    return Calls(
        begin=tag,
        opening=first + begin,
        between=between,
        end=end + behind,
        ends=tags,
        again=apart.strip() if array else "",
        around=(first, apart, behind),
        array=array,
        header=header,
        noise=noise,
    )


def _loosely(text: str) -> str:
    """Return a pattern of the text with any other white space and other numbers."""
    words = (re.sub(r"\d+", r"\\d{1,9}", re.escape(word)) for word in re.split(r"\s+", text))
    return r"\s{0,8}".join(words)
