"""The model's chat template: conversations as text in which content cannot forge a role."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rootlace.runtime.gateway.tokens import chat_format
from rootlace.runtime.model.checkpoint.source import ModelSource
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, Part, Text

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


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
    ) -> None:
        """Raises InvalidRequest where the template has a syntax error."""
        self.source = source
        self._tokens = dict(tokens or {})
        self._special = _special_matcher(special)
        self._bos = bos
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
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
        return cls(source.chat_template(), special, tokens, bos)

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

        The template's text is special, and so is content that holds no special token; of special
        tokens in the messages (or tools) the first character is ordinary text, so that they are not
        recognised. `more` are further variables of the template. Raises InvalidRequest where the
        template refuses the conversation, or values are nested too deeply.
        """
        if self._template is None:
            parts = chat_format.write(self.format, messages, add_generation_prompt)
            return parts[:-1] if continue_final else parts
        flat = [_flat(m) for m in messages]
        given = {"messages": flat, "tools": tools or None, **more}
        try:
            mark = _unused_character(given)
            marked = _marked(given, self._special, mark)
        except RecursionError:
            raise InvalidRequest("the conversation holds values nested too deeply") from None
        if continue_final:
            last = marked["messages"][-1]
            last["content"] = (last.get("content") or "") + 2 * mark
        text = self._render(**marked, add_generation_prompt=add_generation_prompt)
        if continue_final:
            text, found, _ = text.rpartition(2 * mark)
            if not found:
                raise InvalidRequest("the chat template does not write the last message's content")
        return tuple(_split(text, mark))

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


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


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


# ---------------------------------------------------------------- content that looks like a token


def _special_matcher(special: Iterable[str]) -> re.Pattern[str] | None:
    """Finds special tokens in content, and at its ends parts that a template could complete."""
    contents = sorted(set(special), key=len, reverse=True)
    if not contents:
        return None
    whole = [re.escape(c) for c in contents]
    heads = {re.escape(c[:n]) for c in contents for n in range(2, len(c))}
    tails = {re.escape(c[n:]) for c in contents for n in range(1, len(c) - 1)}
    ends = [f"(?:{'|'.join(sorted(heads, key=len, reverse=True))})\\Z"] if heads else []
    starts = [f"\\A(?:{'|'.join(sorted(tails, key=len, reverse=True))})"] if tails else []
    return re.compile("|".join([*whole, *ends, *starts]))


def _unused_character(given: Any) -> str:
    """Raises InvalidRequest where every character of private use is in `given`."""
    used = set(json.dumps(given, ensure_ascii=False, default=str))
    for character in map(chr, chain(*_PRIVATE_USE)):
        if character not in used:
            return character
    raise InvalidRequest("the conversation holds every character of private use")


def _marked(value: Any, special: re.Pattern[str] | None, mark: str) -> Any:
    """`value` with the mark behind the first character of everything that looks special."""
    if special is None:
        return value
    if isinstance(value, str):
        return special.sub(lambda m: m.group()[0] + mark + m.group()[1:], value)
    if isinstance(value, dict):
        return {_marked(k, special, mark): _marked(v, special, mark) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(v, special, mark) for v in value]
    return value


def _split(text: str, mark: str) -> Iterable[Text]:
    position = 0
    while (at := text.find(mark, position)) >= 0:
        # The character before the mark interrupts the special run, and with it the token.
        if at - 1 > position:
            yield Text(text[position : at - 1], special=True)
        yield Text(text[at - 1 : at])
        position = at + 1
    if position < len(text):
        yield Text(text[position:], special=True)
