"""Formats of structural tags that say what a whole text is, by xgrammar's names: `sequence`, `or`,
`tag`, `tags_with_separator`, `json_schema` and `const_string`, and `any_text` within a `tag`.

    {"type": "or", "elements": [{"type": "json_schema", "json_schema": {…}},
     {"type": "tags_with_separator", "separator": "\n", "at_least_one": true, "tags": [
      {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</f>"}]}]}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from rootlace.runtime.constrained.automaton import syntax
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.sources.source import is_text
from rootlace.wire.errors import InvalidConstraint

MAX_ELEMENTS = 1024
_Some = msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)

SchemaAt = Callable[[dict[str, Any] | bool, str], dict[str, Any]]
"""What of a schema, which stands at a place, goes into the grammar."""


class AnyText(msgspec.Struct, tag_field="type", tag="any_text"):
    """Everything up to the end of its tag."""


class ConstString(msgspec.Struct, tag_field="type", tag="const_string"):
    value: str


class Json(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: dict[str, Any] | bool


class Tag(msgspec.Struct, tag_field="type", tag="tag"):
    begin: str
    content: Json | AnyText
    end: str


class Tags(msgspec.Struct, tag_field="type", tag="tags_with_separator"):
    tags: Annotated[list[Tag], _Some]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Or(msgspec.Struct, tag_field="type", tag="or"):
    elements: Annotated[list[Format], _Some]


class Sequence(msgspec.Struct, tag_field="type", tag="sequence"):
    elements: Annotated[list[Format], _Some]


Format = ConstString | Json | Tag | Tags | Or | Sequence
TYPES = ("const_string", "json_schema", "tag", "tags_with_separator", "or", "sequence")


class Outer(msgspec.Struct):
    format: Format


def lark_of_format(given: Format, schema_at: SchemaAt) -> str:
    """llguidance's grammar of a whole text. Raises InvalidConstraint naming the place."""
    lark = _Lark(schema_at)
    start = lark.of(given, "format")
    return "\n".join([f"start: {start}", "FREE: /(?s:.)*/", *lark.rules]) + "\n"


class _Lark:
    def __init__(self, schema_at: SchemaAt) -> None:
        self._schema_at = schema_at
        self.rules: list[str] = []

    def of(self, given: Format, place: str) -> str:
        """What stands for it in a rule; rules of its own are in `rules`."""
        match given:
            case ConstString():
                return _lexeme(given.value, f"{place}.value") or '""'
            case Json():
                return self._json(given, place)
            case Tag():
                return self._tag(given, place)
            case Tags():
                return self._tags(given, place)
            case Or() | Sequence():
                between = " | " if isinstance(given, Or) else " "
                inner = [self.of(e, f"{place}.elements[{i}]") for i, e in enumerate(given.elements)]
                return f"({between.join(inner)})"

    def _json(self, given: Json, place: str) -> str:
        schema = self._schema_at(given.json_schema, f"{place}.json_schema")
        return "%json " + json.dumps(schema)

    def _tag(self, tag: Tag, place: str) -> str:
        begin, end = _lexeme(tag.begin, f"{place}.begin"), _lexeme(tag.end, f"{place}.end")
        if isinstance(tag.content, Json):
            return f"{begin} {self._json(tag.content, f'{place}.content')} {end}"
        if not end:
            raise InvalidConstraint(f"structural_tag: {place}.end: what ends any text is missing")
        # A lazy lexeme ends as soon as it can, so the text holds no end.
        return f"{begin} {self._rule('text', f'FREE {end}', '[lazy]')}"

    def _tags(self, given: Tags, place: str) -> str:
        tags = [self._tag(tag, f"{place}.tags[{i}]") for i, tag in enumerate(given.tags)]
        some = one = self._rule("tags", " | ".join(tags))
        if not given.stop_after_first:
            some = f"{one} ({_lexeme(given.separator, f'{place}.separator')} {one})*"
        return f"({some})" if given.at_least_one else f"({some})?"

    def _rule(self, name: str, body: str, how: str = "") -> str:
        name += str(len(self.rules))
        self.rules.append(f"{name}{how}: {body}")
        return name


def _lexeme(text: str, place: str) -> str:
    if not is_text(text):
        raise InvalidConstraint(f"structural_tag: {place}: a lone surrogate is no character")
    return f"/{pattern_of(syntax.Literal(text))}/" if text else ""
