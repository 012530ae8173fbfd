"""Free text with constrained islands, such as tool calls inside prose.

Two notations are read: sglang's,

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}]}

and the `triggered_tags` of xgrammar's and vLLM's newer one, with JSON schemas as content,

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="],
     "tags": [{"begin": "<function=f>", "content": {"type": "json_schema", "json_schema": {…}},
               "end": "</function>"}], "at_least_one": false, "stop_after_first": false}}

What a whole text is, is said by the formats of `tag_formats`.

In free text everything may come, until a trigger is complete: then one of the tags that begin with
it follows, its schema exactly. Where triggers overlap, the one that is complete first counts. With
`at_least_one` the text begins with a tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rootlace.runtime.constrained.automaton import syntax
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.sources import tag_formats
from rootlace.runtime.constrained.sources.source import is_text, parsed
from rootlace.wire.errors import InvalidConstraint

MAX_TAGS = 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Tag:
    begin: str
    schema: dict[str, Any] | bool
    end: str
    place: str
    """Where its schema stands, for messages."""


@dataclass(frozen=True)
class StructuralTag:
    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    """Without those that hold another one: they are never the first to be complete."""
    at_least_one: bool = False
    stop_after_first: bool = False


_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Some = msgspec.Meta(min_length=1, max_length=MAX_TAGS)


class _Structure(msgspec.Struct):
    begin: _Name
    schema: dict[str, Any] | bool
    end: str


class _Structures(msgspec.Struct):
    structures: Annotated[list[_Structure], _Some]
    triggers: Annotated[list[_Name], _Some]


# A tagged struct would do without its tag where it is not one of several.
class _Content(msgspec.Struct):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool


class _TriggeredTag(msgspec.Struct):
    begin: _Name
    content: _Content
    end: str


class _TriggeredTags(msgspec.Struct):
    type: Literal["triggered_tags"]
    tags: Annotated[list[_TriggeredTag], _Some]
    triggers: Annotated[list[_Name], _Some]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Any = None


class _Format(msgspec.Struct):
    format: _TriggeredTags


def parse_structural_tag(source: str) -> StructuralTag | tag_formats.Format:
    """Raises InvalidConstraint naming the place."""
    value = parsed("structural_tag", source)
    inner = value.get("format") if isinstance(value, dict) else None
    if isinstance(inner, dict) and inner.get("type") in tag_formats.TYPES:
        return _converted(value, tag_formats.Outer).format
    if not (isinstance(value, dict) and "format" in value):
        older = _converted(value, _Structures)
        tags = [
            Tag(one.begin, one.schema, one.end, f"structures[{index}].schema")
            for index, one in enumerate(older.structures)
        ]
        return _checked(tags, older.triggers, "structures")
    newer = _converted(value, _Format).format
    if newer.excludes:
        raise _wrong("format.excludes", "is not supported")
    tags = [
        Tag(
            one.begin, one.content.json_schema, one.end, f"format.tags[{index}].content.json_schema"
        )
        for index, one in enumerate(newer.tags)
    ]
    flags = (newer.at_least_one, newer.stop_after_first)
    return _checked(tags, newer.triggers, "format.tags", *flags)


def _converted(value: Any, type_: type[T]) -> T:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise _wrong(place.strip(".`"), what) from None


def _checked(tags: list[Tag], triggers: list[str], name: str, *flags: bool) -> StructuralTag:
    given = dict.fromkeys(triggers)
    first = tuple(t for t in given if not any(o != t and o in t for o in given))
    for index, trigger in enumerate(triggers):
        _refuse_surrogates(f"triggers[{index}]", trigger)
    for index, tag in enumerate(tags):
        place = f"{name}[{index}].begin"
        _refuse_surrogates(place, tag.begin)
        _refuse_surrogates(f"{name}[{index}].end", tag.end)
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise _wrong(place, f"{tag.begin!r} starts with none of the triggers")
        if not any(tag.begin.startswith(trigger) for trigger in first):
            raise _wrong(
                place,
                f"the trigger of {tag.begin!r} holds another trigger, which is complete first",
            )
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise _wrong("triggers", f"no tag begins with {trigger!r}")
    return StructuralTag(tuple(tags), first, *flags)


def _refuse_surrogates(place: str, text: str) -> None:
    if not is_text(text):
        raise _wrong(place, "a lone surrogate is no character")


def _wrong(place: str, what: str) -> InvalidConstraint:
    return InvalidConstraint(f"structural_tag: {place}{': ' if place else ''}{what}")


def lark_of_tags(tag: StructuralTag, schema_of: Callable[[Tag], dict[str, Any]]) -> str:
    """llguidance's grammar. `schema_of` gives what of a tag's schema goes into it."""
    # A lazy lexeme ends as soon as it can, so the free text before a trigger holds none.
    lines = ["FREE: /(?s:.)*/"]
    first = []
    for number, trigger in enumerate(tag.triggers):
        lines.append(f"trigger{number}[lazy]: FREE {_lexeme(trigger)}")
        bodies = [
            " ".join(
                [
                    _lexeme(island.begin.removeprefix(trigger)),
                    "%json " + json.dumps(schema_of(island)),
                    _lexeme(island.end),
                ]
            )
            for island in tag.tags
            if island.begin.startswith(trigger)
        ]
        lines.append(f"body{number}: {' | '.join(bodies)}")
        lines.append(f"tag{number}: trigger{number} body{number}")
        first.append(f"{_lexeme(trigger)} body{number}")
    any_tag = "(" + " | ".join(f"tag{number}" for number in range(len(tag.triggers))) + ")"
    # As xgrammar has it, the one that there has to be comes first: behind free text it may never.
    start = f"({' | '.join(first)})" if tag.at_least_one else ""
    if not tag.stop_after_first:
        start = f"{start} {any_tag}* FREE"
    elif not tag.at_least_one:
        start = f"{any_tag} | FREE"
    return "\n".join([f"start: {start}", *lines]) + "\n"


def _lexeme(text: str) -> str:
    return f"/{pattern_of(syntax.Literal(text))}/" if text else ""
