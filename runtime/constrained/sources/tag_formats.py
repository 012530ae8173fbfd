"""What structural tags may say: the notations, as they are read.

sglang's, `Structures`, is free text with constrained islands:

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}]}

xgrammar's and vLLM's newer one has a `format`, with the same as `triggered_tags`,

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="],
     "tags": [{"begin": "<function=f>", "content": {"type": "json_schema", "json_schema": {…}},
               "end": "</function>"}], "at_least_one": false, "stop_after_first": false}}

or what the whole text is, by `sequence`, `or`, `tag`, `tags_with_separator`, `json_schema` and
`const_string`, and `any_text` within a `tag`:

    {"type": "or", "elements": [{"type": "json_schema", "json_schema": {…}},
     {"type": "tags_with_separator", "separator": "\n", "at_least_one": true, "tags": [
      {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</f>"}]}]}

In free text everything may come, until a trigger is complete: then one of the tags that begin with
it follows, its content exactly. Where triggers overlap, the one that is complete first counts. With
`at_least_one` the text begins with a tag.

What a special token is written as is this token, in all literals. Free text may hold special tokens
that do not end the sequence, `any_text` of these those that no literal names. What ends the
sequence may be the end of a tag or of a `const_string` alone, and nothing follows it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MAX_ELEMENTS = 1024
_Some = msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)
_Name = Annotated[str, msgspec.Meta(min_length=1)]


class Structure(msgspec.Struct):
    begin: _Name
    schema: dict[str, Any] | bool
    end: str


class Structures(msgspec.Struct):
    structures: Annotated[list[Structure], _Some]
    triggers: Annotated[list[_Name], _Some]


class AnyText(msgspec.Struct, tag_field="type", tag="any_text"):
    """Everything up to the end of its tag."""


class ConstString(msgspec.Struct, tag_field="type", tag="const_string"):
    value: str


class Json(msgspec.Struct, tag_field="type", tag="json_schema"):
    """`lenient`: what of the schema cannot be held is not, and a tag is not refused for it."""

    json_schema: dict[str, Any] | bool
    lenient: bool = False


class Tag(msgspec.Struct, tag_field="type", tag="tag"):
    begin: str
    content: Format | AnyText
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


class Triggered(msgspec.Struct, tag_field="type", tag="triggered_tags"):
    """Nothing can follow the free text of it."""

    tags: Annotated[list[Tag], _Some]
    triggers: Annotated[list[_Name], _Some]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Any = None


Format = ConstString | Json | Tag | Tags | Or | Sequence


class Outer(msgspec.Struct):
    format: Format | Triggered
