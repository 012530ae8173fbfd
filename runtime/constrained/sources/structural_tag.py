"""Free text with constrained islands, such as tool calls inside prose.

Two notations are read: sglang's,

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}]}

and the `triggered_tags` of xgrammar's and vLLM's newer one, with JSON schemas as content,

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="],
     "tags": [{"begin": "<function=f>", "content": {"type": "json_schema", "json_schema": {…}},
               "end": "</function>"}], "at_least_one": false, "stop_after_first": false}}

In free text everything may come, until a trigger is complete: then one of the tags that begin with
it follows, its schema exactly. Where triggers overlap, the one that is complete first counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.automaton.syntax import Literal
from rootlace.runtime.constrained.sources.source import parsed
from rootlace.wire.errors import InvalidConstraint

MAX_TAGS = 1024


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
    at_least_one: bool = False
    stop_after_first: bool = False


def parse_structural_tag(source: str) -> StructuralTag:
    """Raises InvalidConstraint naming the place."""
    value = parsed("structural_tag", source)
    if not isinstance(value, dict):
        raise _wrong("", "must be a JSON object")
    if "format" in value:
        return _triggered_tags(value["format"])
    tags = [
        Tag(
            _text(item, "begin", place),
            _schema(item, "schema", place),
            _text(item, "end", place, may_be_empty=True),
            f"{place}.schema",
        )
        for place, item in _objects(value, "structures", "")
    ]
    return _checked(StructuralTag(tuple(tags), _triggers(value, "")), "structures")


def _triggered_tags(value: Any) -> StructuralTag:
    if not isinstance(value, dict) or value.get("type") != "triggered_tags":
        raise _wrong("format.type", 'must be "triggered_tags"')
    if value.get("excludes"):
        raise _wrong("format.excludes", "is not supported")
    tags = []
    for place, item in _objects(value, "tags", "format."):
        content = item.get("content")
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise _wrong(f"{place}.content.type", 'must be "json_schema"')
        tags.append(
            Tag(
                _text(item, "begin", place),
                _schema(content, "json_schema", f"{place}.content"),
                _text(item, "end", place, may_be_empty=True),
                f"{place}.content.json_schema",
            )
        )
    flags = {}
    for name in ("at_least_one", "stop_after_first"):
        flags[name] = value.get(name, False)
        if not isinstance(flags[name], bool):
            raise _wrong(f"format.{name}", "must be a boolean")
    triggers = _triggers(value, "format.")
    return _checked(StructuralTag(tuple(tags), triggers, **flags), "format.tags")


def _objects(value: dict[str, Any], name: str, prefix: str) -> list[tuple[str, dict[str, Any]]]:
    items = value.get(name)
    if not isinstance(items, list) or not 0 < len(items) <= MAX_TAGS:
        raise _wrong(prefix + name, f"must be an array of 1 to {MAX_TAGS} objects")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise _wrong(f"{prefix}{name}[{index}]", "must be an object")
    return [(f"{prefix}{name}[{index}]", item) for index, item in enumerate(items)]


def _triggers(value: dict[str, Any], prefix: str) -> tuple[str, ...]:
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not 0 < len(triggers) <= MAX_TAGS:
        raise _wrong(f"{prefix}triggers", f"must be an array of 1 to {MAX_TAGS} strings")
    for index, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger or not _is_text(trigger):
            place = f"{prefix}triggers[{index}]"
            raise _wrong(place, "must be a string of at least one character")
    return tuple(dict.fromkeys(triggers))


def _text(item: dict[str, Any], name: str, place: str, may_be_empty: bool = False) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not (value or may_be_empty) or not _is_text(value):
        raise _wrong(f"{place}.{name}", "must be a string" + (", not empty" * (not may_be_empty)))
    return value


def _schema(item: dict[str, Any], name: str, place: str) -> dict[str, Any] | bool:
    value = item.get(name)
    if not isinstance(value, dict | bool):
        raise _wrong(f"{place}.{name}", "must be a JSON schema: an object or a boolean")
    return value


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _checked(found: StructuralTag, name: str) -> StructuralTag:
    for index, tag in enumerate(found.tags):
        if not any(tag.begin.startswith(trigger) for trigger in found.triggers):
            raise _wrong(
                f"{name}[{index}].begin", f"{tag.begin!r} starts with none of the triggers"
            )
    for trigger in found.triggers:
        if not any(tag.begin.startswith(trigger) for tag in found.tags):
            raise _wrong("triggers", f"no tag begins with {trigger!r}")
    first = first_triggers(found)
    for index, tag in enumerate(found.tags):
        if not any(tag.begin.startswith(trigger) for trigger in first):
            raise _wrong(
                f"{name}[{index}].begin",
                f"the trigger of {tag.begin!r} holds another trigger, which is complete first",
            )
    return found


def first_triggers(tag: StructuralTag) -> list[str]:
    """Without those that hold another one: they are never the first to be complete."""
    triggers = tag.triggers
    return [t for t in triggers if not any(o != t and o in t for o in triggers)]


def _wrong(place: str, what: str) -> InvalidConstraint:
    return InvalidConstraint(f"structural_tag: {place}{': ' if place else ''}{what}")


def lark_of_tags(tag: StructuralTag, schema_of: Callable[[Tag], dict[str, Any]]) -> str:
    """llguidance's grammar. `schema_of` gives what of a tag's schema goes into it."""
    # A lazy lexeme ends as soon as it can, so the free text before a trigger holds none.
    triggers = first_triggers(tag)
    lines = ["FREE: /(?s:.)*/"]
    for number, trigger in enumerate(triggers):
        lines.append(f"trigger{number}[lazy]: FREE /{pattern_of(Literal(trigger))}/")
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
        lines.append(f"tag{number}: trigger{number} ({' | '.join(bodies)})")
    any_tag = "(" + " | ".join(f"tag{number}" for number in range(len(triggers))) + ")"
    some = any_tag if tag.stop_after_first else any_tag + "*+"[tag.at_least_one]
    if not tag.stop_after_first:
        start = f"{some} FREE"
    else:
        start = some if tag.at_least_one else f"{some} | FREE"
    return "\n".join([f"start: {start}", *lines]) + "\n"


def _lexeme(text: str) -> str:
    return f"/{pattern_of(Literal(text))}/" if text else ""
