"""The model's chat template: conversations as text in which content cannot forge a role."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rootlace.runtime.gateway.tokens import chat_format
from rootlace.runtime.gateway.tokens.lookalikes import Lookalikes, split
from rootlace.runtime.model.checkpoint.source import ModelSource
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, Part

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# A variable of this name: no template can write it.
_MARK = "the mark of content"


class ChatTemplate:
    """A Jinja chat template with the globals that transformers gives it.

    `special` are the special tokens' contents; `bos` is what the tokenizer's post-processor puts
    before a text. Without a template a plain "USER: ..." format is used.
    """

    def __init__(
        self,
        source: str | None,
        special: Iterable[str] = (),
        tokens: Mapping[str, str] | None = None,
        bos: str = "",
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """`tool_use`: the template of conversations with tools, if the model has one of its own.
        Raises InvalidRequest where the template has a syntax error."""
        self.source = source
        self.tool_use = tool_use
        self._tokens = dict(tokens or {})
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._environment = _Environment(source, special)
                self._template = self._environment.from_string(source)
            except jinja2.TemplateError as error:
                raise InvalidRequest(f"the chat template cannot be read: {error}") from error
        self.format: ChatFormat = chat_format.plain(bos)
        if self._template is not None:
            probed = chat_format.derive(self._render, self._tokens.get("bos_token", ""))
            self.format = probed or self.format

    @classmethod
    def read(cls, source: ModelSource, special: Iterable[str], bos: str) -> ChatTemplate:
        """That of a model."""
        config = source.tokenizer_config()
        tokens = {name: _content(config[name]) for name in _TOKEN_NAMES if config.get(name)}
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
        """A conversation as parts for one `Append`; with `continue_final` it ends with the last
        message's content, which the model is to go on with.

        The template's text is special, and so is content that looks like no special token; of what
        does (`Lookalikes`) the first character is ordinary text, so that it is not recognised.
        `more` are further variables of the template. Raises InvalidRequest where the template
        refuses the conversation, or values are nested too deeply.
        """
        if self._template is None:
            parts = chat_format.write(self.format, messages, add_generation_prompt)
            return parts[:-1] if continue_final else parts
        flat = [_flat(m) for m in messages]
        given = {"messages": flat, "tools": tools or None, **more}
        try:
            mark = _unused_character(given)
            marked = self._environment.lookalikes.marked(given, mark)
        except RecursionError:
            raise InvalidRequest("the conversation holds values nested too deeply") from None
        if continue_final:
            last = marked["messages"][-1]
            last["content"] = (last.get("content") or "") + 2 * mark
        marked |= {"add_generation_prompt": add_generation_prompt, _MARK: mark}
        text = self._render(**marked)
        if continue_final:
            text, found, _ = text.rpartition(2 * mark)
            if not found:
                raise InvalidRequest("the chat template does not write the last message's content")
        return tuple(split(text, mark))

    def _render(self, /, **context: Any) -> str:
        assert self._template is not None
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        try:
            return self._template.render({**self._tokens, **context})
        except InvalidRequest:
            raise
        except Exception as error:  # a template may do anything to odd messages
            raise InvalidRequest(f"the chat template refuses this conversation: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only passes it on."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """What a template may do. Where it replaces a part of a text, content stays content."""

    def __init__(self, source: str, special: Iterable[str]) -> None:
        """Raises jinja2.TemplateError where the template has a syntax error."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.lookalikes = Lookalikes(special, _words(self.parse(source)))
        self.filters["tojson"] = _to_json
        self.filters["replace"] = self.replace
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    @jinja2.pass_context
    def replace(
        self, context: Context, text: Any, old: Any, new: Any, count: int | None = None
    ) -> str:
        """Jinja's filter, and the method of a text."""
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
    """What a template looks for in messages: names of items, and texts."""
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


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content given as a list of text parts becomes one string."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return {**message, "content": "".join(part.get("text", "") for part in content)}
    return dict(message)


def _unused_character(given: Any) -> str:
    """Raises InvalidRequest where every character of private use is in `given`."""
    used = set(json.dumps(given, ensure_ascii=False, default=str))
    for character in map(chr, chain(*_PRIVATE_USE)):
        if character not in used:
            return character
    raise InvalidRequest("the conversation holds every character of private use")
