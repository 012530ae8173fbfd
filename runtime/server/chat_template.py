"""Chat template of a model: conversations as text in which content cannot forge a role."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import chain, pairwise
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rootlace.runtime.model.checkpoint.source import ModelSource
from rootlace.wire import chat_format
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, Part, RoleFormat, Text

# Chat format --------------------------------------------------------------------------------------
#
# A chat template as per-role text, found by taking small rendered conversations apart.


Render = Callable[..., str]

_S, _U, _A, _V, _T = (f"\u2603{name}\u2603" for name in ("sys", "one", "two", "three", "tool"))


def plain(bos: str = "") -> ChatFormat:
    """Return the format of models without a template."""
    return ChatFormat(
        opening=bos,
        roles={
            "system": RoleFormat("SYSTEM: ", "\n"),
            "user": RoleFormat("USER: ", "\n"),
            "assistant": RoleFormat("ASSISTANT:", "\n"),
            "tool": RoleFormat("TOOL: ", "\n"),
        },
    )


def write(
    form: ChatFormat, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
) -> tuple[Part, ...]:
    """Write a conversation. Raises InvalidRequest for an unknown role or content not text."""
    parts: list[Part] = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content") or ""
        if role not in form.roles:
            raise InvalidRequest(f"messages[{index}]: unknown role {role!r}")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if not isinstance(content, str):
            raise InvalidRequest(f"messages[{index}]: content must be text")
        space = " " if role == "assistant" and form.roles[role].begin[-1:].isalnum() else ""
        begin = chat_format.begin(form, role, opened=index > 0)
        parts += [*begin, Text(space + content), *chat_format.end(form, role)]
    if add_generation_prompt:
        parts += chat_format.begin(form, "assistant", opened=bool(messages))
    return tuple(parts)


def derive(render: Render, bos: str) -> ChatFormat | None:
    """Derive the format behind a template; None where that is impossible.

    The begin of `assistant` is the template's generation prompt. This prompt may differ from the
    begin of an earlier answer (a thinking model's prompt opens its thoughts). Some templates put
    the system message inside the first user turn, and have no exact per-role form. There the system
    message is written as a user turn of its own.
    """
    try:
        return _derive(render, bos)
    except (InvalidRequest, _NoFormatError):
        return None


class _NoFormatError(Exception):
    pass


def _derive(render: Render, bos: str) -> ChatFormat:
    user, answer, again = _message("user", _U), _message("assistant", _A), _message("user", _V)
    before_user, user_end = _cut(_text(render, [user]), _U)
    _, generation = _cut(_text(render, [user], generate=True), _U)
    assistant_begin = _without_prefix(generation, user_end)
    _, assistant_end = _cut(_text(render, [user, answer]), _A)
    _, between = _cut(_text(render, [user, answer, again]), _A)
    between, _ = _cut(between, _V)
    user_begin = _without_prefix(between, assistant_end)
    head = _without_suffix(before_user, user_begin)
    user_format = RoleFormat(user_begin, user_end)
    roles = {"user": user_format, "assistant": RoleFormat(assistant_begin, assistant_end)}
    opening, default, system = _system(render, head, user_format, bos)
    roles["system"] = system
    tool = _tool(render, [user, answer], assistant_end)
    if tool is not None:
        roles["tool"] = tool
    return ChatFormat(opening, default, roles)


def _system(render: Render, head: str, user: RoleFormat, bos: str) -> tuple[str, str, RoleFormat]:
    """Derive the opening, the default system text, and the system role's format.

    `head` is the text that the template writes before a conversation without a system message.
    """
    once = not user.begin.startswith(bos)  # SmolLM2's begins every message
    opening = bos if head.startswith(bos) and once else ""
    try:
        text = _text(render, [_message("system", _S), _message("user", _U)])
        before, after = _cut(text, _S)
        between, _ = _cut(after, _U)
        end = _without_suffix(between, user.begin)
        if before.startswith(head):
            opening = head
        return opening, head[len(opening) :], RoleFormat(_without_prefix(before, opening), end)
    except (InvalidRequest, _NoFormatError):
        # No system messages, or inside the user's turn.
        return opening, head[len(opening) :], user


def _tool(render: Render, before: list[dict[str, Any]], assistant_end: str) -> RoleFormat | None:
    try:
        text = _text(render, [*before, _message("tool", _T)])
        begin, end = _cut(text, _T)
        _, begin = _cut(begin, _A)
        return RoleFormat(_without_prefix(begin, assistant_end), end)
    except (InvalidRequest, _NoFormatError):
        return None


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(render: Render, messages: list[dict[str, Any]], generate: bool = False) -> str:
    return render(messages=messages, add_generation_prompt=generate)


def _cut(text: str, sentinel: str) -> tuple[str, str]:
    before, found, after = text.partition(sentinel)
    if not found or sentinel in after:
        raise _NoFormatError
    return before, after


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise _NoFormatError
    return text[len(prefix) :]


def _without_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise _NoFormatError
    return text[: len(text) - len(suffix)]


# Lookalikes ---------------------------------------------------------------------------------------
#
# Content of a conversation that looks like a special token, or could become one.


_USUAL = frozenset(
    {
        *("messages", "tools", "role", "content", "name", "system", "user", "assistant", "tool"),
        *("tool_calls", "tool_call_id", "id", "type", "function", "arguments", "parameters"),
        *("description", "properties", "required", "object", "array", "items", "string", "enum"),
    }
)
"""Names and values in nearly every conversation. Only these are cached, not clients' own texts."""


class Lookalikes:
    """Marker of content: puts a mark behind the first character of all that looks special.

    Three things look special: a special token in any case of letters; at a text's ends (white space
    aside) a part of a token that neighbouring text could complete; and a text that is the inner
    part of a token, unless the template itself looks for it (`words`).
    """

    def __init__(self, special: Iterable[str], words: Collection[str] = ()) -> None:
        contents = {*special} - {""}
        self._whole = re.compile(_one_of(contents), re.IGNORECASE)
        cut = [(c[:n].rstrip(), c[n:].lstrip()) for c in contents for n in range(1, len(c))]
        self._heads = tuple({_folded(head) for head, _ in cut if _looks_special(head)})
        self._tails = tuple({_folded(tail) for _, tail in cut if _looks_special(tail)})
        self._all = "\n".join(contents).casefold()
        self._cores = {c[1:-1].casefold() for c in contents}
        self._longest = max(map(len, contents), default=0)
        self._words = frozenset(words)
        self._usual = lru_cache(1024)(self._text)

    def marked(self, value: Any, mark: str) -> Any:
        """Return `value` with marks in all its texts and names of items."""
        if isinstance(value, str):
            return self._text(value, mark)
        if isinstance(value, dict):
            marked_texts = {}
            for name, one in value.items():
                name = self._usual(name, mark) if name in _USUAL else self.marked(name, mark)
                if type(one) is not str:
                    marked_texts[name] = self.marked(one, mark)
                else:
                    marked_texts[name] = (self._usual if one in _USUAL else self._text)(one, mark)
            return marked_texts
        if isinstance(value, list | tuple):
            return [self.marked(one, mark) for one in value]
        return value

    def remarked(self, before: str, after: str, mark: str) -> str:
        """Mark `after`, which a template's replacement made of `before`, if `after` has special
        tokens that `before` lacks: these were put together of content."""
        made = Counter(self._whole.findall(after))
        return self._text(after, mark) if made - Counter(self._whole.findall(before)) else after

    def _text(self, text: str, mark: str) -> str:
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        places, at = set[int](), 0
        while match := self._whole.search(text, at):
            at = _first_of(match) + 1  # a token may begin within another
            places.add(at - 1)
        # Parts of tokens are looked for at the ends alone, since texts may be long.
        longest = min(self._longest, end - begin)
        lengths = range(longest, 0, -1)
        if _folded(text[begin : begin + longest]).startswith(self._tails) and any(
            _folded(text[begin : begin + n]) in self._tails for n in lengths
        ):
            places.add(begin)
        if _folded(text[end - longest : end]).endswith(self._heads):
            places.update(end - n for n in lengths if _folded(text[end - n : end]) in self._heads)
        inner = text[begin:end]
        if not places and inner and end - begin <= self._longest and inner not in self._words:
            folded = inner.casefold()
            if folded in self._cores or (not inner.isalnum() and folded in self._all):
                places.add(begin)
        if not places:
            return text
        borders = [0, *(place + 1 for place in sorted(places)), len(text)]
        return mark.join(text[one:other] for one, other in pairwise(borders))


def split(text: str, mark: str) -> tuple[Text, ...]:
    """Split a template's text into parts: the character before each mark is ordinary text."""
    parts, position = [], 0
    while (at := text.find(mark, position)) >= 0:
        # The character before the mark interrupts the special run, and with it the token.
        if at - 1 > position:
            parts.append(Text(text[position : at - 1], special=True))
        parts.append(Text(text[at - 1 : at]))
        position = at + 1
    if position < len(text):
        parts.append(Text(text[position:], special=True))
    return tuple(parts)


def _one_of(contents: Collection[str]) -> str:
    """Return a pattern of the contents, longest match first. The pattern is a tree of characters: a
    place of a text is read only as long as one may match."""
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for character in content:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(tree) if contents else "(?!)"


def _pattern(node: dict[str, Any]) -> str:
    ways = [
        re.escape(character) + _pattern(below) for character, below in node.items() if character
    ]
    if not ways:
        return ""
    some = f"(?:{'|'.join(ways)})" if len(ways) > 1 or "" in node else ways[0]
    return some + "?" * ("" in node)


def _looks_special(part: str) -> bool:
    """Return whether a part could begin or end a token: a single letter or digit could not."""
    part = part.strip()
    return len(part) > 1 or bool(part and not part.isalnum())


def _folded(text: str) -> str:
    """Fold a text so that texts which differ in case alone, or would after `upper`, are equal."""
    return text.upper().casefold()


def _first_of(match: re.Match[str]) -> int:
    """Return the first place of the match that is no white space."""
    text = match.group()
    return match.start() + len(text) - len(text.lstrip() or text)


# Chat ---------------------------------------------------------------------------------------------


_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_FIRST = ascii(chr(_PRIVATE_USE[0][0]))[1:-1]
# Name of a variable that no template can write.
_MARK = "the mark of content"


class ChatTemplate:
    """Jinja chat template, with the globals that transformers provides.

    `special` holds the special tokens' contents; `bos` is the text that the tokenizer's
    post-processor puts first. Without a template a plain "USER: ..." format is used.
    """

    def __init__(
        self,
        source: str | None,
        special: Iterable[str] = (),
        tokens: Mapping[str, str] | None = None,
        bos: str = "",
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """`tool_use`: a separate template for conversations with tools, if the model has one.
        Raises InvalidRequest where the template has a syntax error."""
        self.source = source
        self.tool_use = tool_use
        self._tokens = dict(tokens or {})
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._environment = _Environment(source, special)
                self._template = self._environment.from_string(source)
                # Each rendering copies these: from jinja2's own chain of maps, in Python.
                self._template.globals = {**self._template.globals}
            except jinja2.TemplateError as error:
                raise InvalidRequest(f"the chat template cannot be read: {error}") from error
        self.format: ChatFormat = plain(bos)
        self._in_parts = False
        if self._template is not None:
            self._in_parts = self._wants_parts()
            probed = derive(self._render, self._tokens.get("bos_token", ""))
            self.format = probed or self.format

    @classmethod
    def read(cls, source: ModelSource, special: Iterable[str], bos: str) -> ChatTemplate:
        """Read a model's chat template."""
        config = source.tokenizer_config()
        tokens = dict(_named_tokens(config))
        named = source.chat_templates()
        tool_use = None
        if "tool_use" in named:
            tool_use = cls(named["tool_use"], special, tokens, bos)
        return cls(named.get("default"), special, tokens, bos, tool_use)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **more: Any,
    ) -> tuple[Part, ...]:
        """Render a conversation as parts for one `Append`. With `continue_final` it ends with the
        last message's content, for the model to continue.

        Template text and harmless content are special text. Content that looks special
        (`Lookalikes`) has an ordinary first character, so no special token is recognised in it. A
        message's `reasoning_content` is also its `thinking`, unless the template refuses that.
        `more` are further variables of the template. Raises InvalidRequest where the template
        refuses the conversation, or values are nested too deeply.
        """
        if self._template is None:
            parts = write(self.format, messages, add_generation_prompt)
            return parts[:-1] if continue_final else parts
        flat = [_flat(m) if isinstance(m.get("content"), list) else {**m} for m in messages]
        arguments = {
            "messages": [*map(_with_thinking, flat)],
            **({"tools": tools} if tools else {}),
            **more,
        }
        try:
            mark = _unused_character(arguments)
            marked = self._environment.lookalikes.marked(arguments, mark)
        except RecursionError:
            raise InvalidRequest("the conversation holds values nested too deeply") from None
        if continue_final:
            last = marked["messages"][-1]
            last["content"] = (last.get("content") or "") + 2 * mark
        marked |= {"add_generation_prompt": add_generation_prompt, _MARK: mark}
        try:
            text = self._render(**marked)
        except InvalidRequest:
            # gpt-oss's template refuses thoughts of a message that has both calls and content.
            refused = [
                message
                for message in marked["messages"]
                if message.get("content") and message.get("tool_calls") and "thinking" in message
            ]
            if not refused:
                raise
            for message in refused:
                del message["thinking"]
            text = self._render(**marked)
        if continue_final:
            text, found, _ = text.rpartition(2 * mark)
            if not found:
                raise InvalidRequest("the chat template does not write the last message's content")
        return split(text, mark)

    def _wants_parts(self) -> bool:
        """Return whether the template takes content as a list of parts, and not as a text. Models
        that see images have such templates (LLaVA, Idefics 3, SmolVLM)."""
        for self._in_parts in (False, True):
            with contextlib.suppress(InvalidRequest):
                found = _text(self._render, [_message("user", _U)])
                # A template that cuts texts writes the list itself, as Python shows it.
                if _U in found and not (self._in_parts and repr(_U) in found):
                    return self._in_parts
        return False

    def _render(self, /, **context: Any) -> str:
        assert self._template is not None
        if self._in_parts:
            context["messages"] = [*map(_with_parts, context["messages"])]
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        try:
            return self._template.render({**self._tokens, **context})
        except InvalidRequest:
            raise
        except Exception as error:  # a template may do anything to odd messages
            raise InvalidRequest(f"the chat template refuses this conversation: {error}") from error


class _GenerationTag(Extension):
    """Tag `{% generation %}`, which marks text for training: here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox of a template. Where a template replaces parts of a text, content stays content."""

    def __init__(self, source: str, special: Iterable[str]) -> None:
        """Raises jinja2.TemplateError where the template has a syntax error."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.lookalikes = Lookalikes(special, _words(self.parse(source)))
        self.filters["tojson"] = _to_json
        self.filters["replace"] = self.replace
        self.filters["safe"] = str  # Jinja's marks a text, and HTML-escapes each text added to it
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    @jinja2.pass_context
    def replace(
        self, context: Context, text: Any, old: Any, new: Any, count: int | None = None
    ) -> str:
        """Replace text as Jinja's filter and the method of a text do, and mark made-up tokens."""
        before = str(text)
        after = before.replace(str(old), str(new), -1 if count is None else count)
        mark = context.get(_MARK)
        return after if mark is None else self.lookalikes.remarked(before, after, mark)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        own = called.__self__ if isinstance(called, BuiltinMethodType) else None
        if isinstance(own, str) and called.__name__ == "replace":
            return self.replace(context, own, *args)
        return super().call(context, called, *args, **kwargs)


def _words(template: nodes.Template) -> set[str]:
    """Return the names of items and texts that a template looks for in messages."""
    found = {node.attr for node in template.find_all(nodes.Getattr)}
    consts = (node.value for node in template.find_all(nodes.Const))
    return found | {value for value in consts if isinstance(value, str)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which is right for HTML only.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(f"the chat template refuses this conversation: {message}")


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Give the special tokens that have names, also names of one model alone (`image_token`)."""
    named = config.get("extra_special_tokens")
    own = named if isinstance(named, dict) else {}
    usual = {name: token for name, token in config.items() if name.endswith("_token")}
    for name, token in (usual | own).items():
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            yield name, content


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join content given as a list of text parts into one string."""
    content = message["content"]
    if all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return {**message, "content": "".join(part.get("text", "") for part in content)}
    return dict(message)


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Give thoughts both names that templates use for them, as transformers does."""
    thoughts = message.get("reasoning_content")
    return message if thoughts is None else {"thinking": thoughts, **message}


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn content that is a text into a list of one part."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _unused_character(arguments: Any) -> str:
    """Find a character of private use that `arguments` lacks. Raises InvalidRequest without one."""
    if _FIRST not in repr(arguments):  # which escapes characters of private use
        return chr(_PRIVATE_USE[0][0])
    used = set(json.dumps(arguments, ensure_ascii=False, default=str))
    for character in map(chr, chain(*_PRIVATE_USE)):
        if character not in used:
            return character
    raise InvalidRequest("the conversation holds every character of private use")
