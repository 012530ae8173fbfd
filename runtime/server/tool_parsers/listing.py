"""Presentation of tools, calls and results to a model: by its chat template, and in Rootlace's own
words where the template has no place for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.tool_parsers.base import HERMES, Format
from rootlace.runtime.server.tool_parsers.learnt import NAME, Message, calling, format_of, rendered
from rootlace.runtime.server.tool_parsers.tagged import Tagged
from rootlace.runtime.server.tool_parsers.tagged_arguments import TaggedArguments
from rootlace.wire.chat_format import enclosed
from rootlace.wire.protocol import ChatFormat, RoleFormat
from rootlace.wire.tool_calls import FORMS, ToolFormat, write_list, write_tool

# Listing ------------------------------------------------------------------------------------------


RESULT = ("<tool_response>\n", "\n</tool_response>")
"""Texts around a result in Rootlace's own words."""

_SYSTEM, _RESULT = "probe the system", "probe the result"
_ROLE = re.compile("""['"]tool['"]""")
RESULTS = ("tool", "function")
"""Roles of messages that are results of calls."""
_ARGUMENTS = {"probe_the_key": "probe the value"}


class ToolPrompt:
    """Writer of conversations with tools for a template, whose abilities are probed once.

    Parts that the template has no place for become content of other messages. Tools stand behind
    the system message's content, or the first user's where there are no system messages. Calls
    stand behind the assistant's text, in the notation of `format`; results in a turn of the user.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.format: Format = format_of(template)
        source = template.source
        user = {"role": "user", "content": "?"}
        conversation = [user, calling(dict(_ARGUMENTS), NAME)]
        result = {"role": "tool", "tool_call_id": "probe0000", "name": NAME, "content": _RESULT}
        self.lists = NAME in rendered(self.template, [user], [_tool(NAME)])
        self.encodes = False
        """True if the template takes the arguments of calls as JSON text."""
        self.calls = self._writes_call(conversation)
        if not self.calls:
            self.encodes = self._writes_call([user, calling(json.dumps(_ARGUMENTS), NAME)])
            self.calls = self.encodes
        guessed = isinstance(self.format, Tagged) and self.format.calls is HERMES
        self.reads = not self.calls or self.encodes or not guessed
        """False where no parser reads the template's calls, such as arguments in tags that say
        their type (DeepSeek V3.2)."""
        if self.encodes:
            conversation = [user, calling(json.dumps(_ARGUMENTS), NAME)]
        elif not self.calls:
            conversation = [user, {"role": "assistant", "content": "?"}]
        # A template that writes any role as it stands does not know results.
        known = source is None or _ROLE.search(source) is not None
        written = rendered(template, [*conversation, result], generate=False).partition(_RESULT)
        self.results = known and bool(written[1])
        self._result_end = written[2] if self.results else RESULT[1]
        system = {"role": "system", "content": _SYSTEM}
        self._system = _SYSTEM in rendered(template, [system, user])
        self._alternates = not rendered(template, [user, user])
        self._default = _default_system(template.format)
        self.listed = tool_format(template, self.format)

    def write(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[list[Message], list[Message] | None, list[str]]:
        """Return the conversation and the tools for the template, and the names of missing
        abilities: tools, calls and results. Parts without a place are rewritten."""
        written, calls, results = [], False, False
        for message in messages:
            if message["role"] in RESULTS:
                results, message = True, self._enclosed(message)
            calls = calls or bool(message.get("tool_calls"))
            written.append(message)
        missing = ["tools"] if tools and not self.lists else []
        if results and not self.results:
            written = self._with_results(written)
        if calls and not self.calls:
            missing.append("calls")
            written = [self._with_calls(message) for message in written]
        elif calls and self.encodes:
            written = [_encoded(message) for message in written]
        if results and not self.results:
            missing.append("results")
        if "tools" not in missing:
            return written, [*tools] or None, missing
        return self._with_tools(written, tools), None, missing

    def _with_tools(self, messages: list[Message], tools: Sequence[Message]) -> list[Message]:
        listing = "".join(text for text, _ in write_list(self.listed, tools))
        if self._system:
            if not messages or messages[0]["role"] != "system":
                messages = [{"role": "system", "content": self._default}, *messages]
            first = messages[0]
            content = f"{_content(first)}{listing}".lstrip()
            return [{**first, "content": content}, *messages[1:]]
        at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            return [{"role": "user", "content": listing.strip()}, *messages]
        content = f"{listing.strip()}\n\n{_content(messages[at])}"
        return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]

    def _with_calls(self, message: Message) -> Message:
        """Return the message with its calls as text behind its content."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        form, (first, between, behind) = self.format, self.format.around
        written = []
        for call in calls:
            raw = call["function"]["arguments"]
            source = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
            begin = form.begin(call["function"]["name"]).removeprefix(first)
            written.append(f"{begin}{source}{form.end.removesuffix(behind)}")
        text = f"{first}{between.join(written)}{behind}"
        content = _content(message).rstrip()
        other = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**other, "content": f"{content}\n{text}" if content else text}

    def _with_results(self, messages: Sequence[Message]) -> list[Message]:
        """Turn results behind a message into a turn of the user, in the order of its calls."""
        merged: list[Message] = []
        order: dict[str | None, int] = {}
        results: list[Message] = []

        def turn() -> None:
            if results:
                results.sort(key=lambda one: order.get(one.get("tool_call_id"), len(order)))
                texts = [f"{RESULT[0]}{_content(one)}{RESULT[1]}" for one in results]
                merged.append({"role": "user", "content": "\n".join(texts)})
                results.clear()

        for message in messages:
            if message["role"] in RESULTS:
                results.append(message)
                continue
            own = bool(results)
            turn()
            order = {call["id"]: n for n, call in enumerate(message.get("tool_calls") or ())}
            if own and self._alternates and message["role"] == "user":
                before = merged.pop()["content"]
                message = {**message, "content": f"{before}\n\n{_content(message)}"}
            merged.append(message)
        turn()
        return merged

    def _enclosed(self, result: Message) -> Message:
        """Escape a result's content, which must not end the result: others' words would follow."""
        content = result.get("content")
        if not isinstance(content, str):
            return result
        return {**result, "content": enclosed(content, self._result_end)}

    def _writes_call(self, messages: list[Message]) -> bool:
        text = rendered(self.template, messages)
        return NAME in text and _ARGUMENTS["probe_the_key"] in text


def chat_format(template: ChatTemplate, with_tools: ChatTemplate, refuse: str = "") -> ChatFormat:
    """Return the format for programs: messages of `template`, tools of `with_tools`. With `refuse`,
    tools without a place in it are refused for that reason."""
    prompt = ToolPrompt(with_tools)
    listed = prompt.listed
    if refuse and not prompt.lists:
        listed = msgspec.structs.replace(listed, refused=refuse)
    form = template.format
    if not prompt.results and "user" in form.roles:
        user = form.roles["user"]
        results = RoleFormat(user.begin + RESULT[0], RESULT[1] + user.end)
        form = msgspec.structs.replace(form, roles={**form.roles, "tool": results})
    return msgspec.structs.replace(form, tools=listed)


def tool_format(template: ChatTemplate, form: Format) -> ToolFormat:
    """Return the template's listing of tools behind a system message's content. Where it lists them
    elsewhere or not at all, use Rootlace's own words."""
    begin, _, between = form.begin(NAME).partition(NAME)
    own = ToolFormat()
    argument, after = None, own.after
    plain = written = '{"argument": "value"}'
    if isinstance(form, TaggedArguments):
        argument = form.argument
        after = after.replace("its arguments as JSON", "each argument in tags of its own")
        written = argument.written("argument", "value")
    example = f"{begin}the_name{between}{written}{form.end}"
    found = ToolFormat(
        trigger=form.trigger,
        begin=begin,
        between=between,
        end=form.end,
        around=form.around,
        argument=argument,
        after=after.replace(f"{own.begin}the_name{own.between}{plain}{own.end}", example),
    )
    listing = _listing(template)
    one, other = _TOOLS
    for kind in FORMS:
        before, first, rest = listing.partition(write_tool(kind, one))
        separator, second, after = rest.partition(write_tool(kind, other))
        if first and second:
            return msgspec.structs.replace(
                found, form=kind, before=before, separator=separator, after=after
            )
    return found


def _tool(name: str) -> dict[str, Any]:
    function = {
        "name": name,
        "description": f"Describe {name}.",
        "parameters": {
            "type": "object",
            "properties": {f"{name}_one": {"type": "string"}, f"{name}_two": {"type": "string"}},
        },
    }
    return {"type": "function", "function": function}


_TOOLS = [_tool("probe_a"), _tool("probe_b")]


def _listing(template: ChatTemplate) -> str:
    """Return the text behind the system message's content that tools add."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "?"}]
    usual = rendered(template, messages).partition(_SYSTEM)[2]
    listed = rendered(template, messages, _TOOLS).partition(_SYSTEM)[2]
    return listed.removesuffix(usual) if usual and listed.endswith(usual) else ""


def _encoded(message: Message) -> Message:
    """Return the message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        value = call["function"]["arguments"]
        source = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": source}})
    return {**message, "tool_calls": calls} if calls else message


def _content(message: Mapping[str, Any]) -> str:
    return message.get("content") or ""


def _default_system(form: ChatFormat) -> str:
    """Return the content of the template's default system message."""
    role = form.roles.get("system")
    text = form.default_system
    if role is None or not (text.startswith(role.begin) and text.endswith(role.end)):
        return ""
    return text.removeprefix(role.begin).removesuffix(role.end)
