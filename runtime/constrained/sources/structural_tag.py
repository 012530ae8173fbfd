"""Structural tags as llguidance's grammars: see `tag_formats`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rootlace.runtime.constrained.automaton import syntax
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.schema.guidance import written
from rootlace.runtime.constrained.sources import tag_formats as given
from rootlace.runtime.constrained.sources.source import is_text, parsed
from rootlace.wire.errors import InvalidConstraint

SchemaAt = Callable[[dict[str, Any] | bool, str], dict[str, Any]]
"""What of a schema, which stands at a place, goes into the grammar."""


def lark_of_structural_tag(source: str, schema_at: SchemaAt) -> str:
    """Raises InvalidConstraint naming the place."""
    value = parsed("structural_tag", source)
    newer = isinstance(value, dict) and "format" in value
    kind: Any = given.Outer if newer else given.Structures
    try:
        outer = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise _wrong(place.strip(".`"), what) from None
    lark = _Lark(schema_at)
    if isinstance(outer, given.Structures):
        start = lark.triggered(outer.structures, "structures", outer.triggers)
    elif isinstance(outer.format, given.Triggered):
        if outer.format.excludes:
            raise _wrong("format.excludes", "is not supported")
        flags = (outer.format.at_least_one, outer.format.stop_after_first)
        start = lark.triggered(outer.format.tags, "format.tags", outer.format.triggers, *flags)
    else:
        start = lark.of(outer.format, "format")
    return "\n".join([f"start: {start}", "FREE: /(?s:.)*/", *lark.rules]) + "\n"


class _Lark:
    def __init__(self, schema_at: SchemaAt) -> None:
        self._schema_at = schema_at
        self.rules: list[str] = []

    def of(self, one: given.Format, place: str) -> str:
        """What stands for it in a rule; rules of its own are in `rules`."""
        match one:
            case given.ConstString():
                return _lexeme(one.value, f"{place}.value") or '""'
            case given.Json():
                return self._json(one.json_schema, f"{place}.json_schema")
            case given.Tag():
                return self._tag(one, place)
            case given.Tags():
                return self._tags(one, place)
            case given.Or() | given.Sequence():
                between = " | " if isinstance(one, given.Or) else " "
                inner = [self.of(e, f"{place}.elements[{i}]") for i, e in enumerate(one.elements)]
                return f"({between.join(inner)})"

    def triggered(
        self,
        tags: Sequence[given.Tag | given.Structure],
        place: str,
        triggers: Sequence[str],
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Free text with tags, which stand at `place`."""
        behind_text, at_once = [], []
        for trigger in _checked_triggers(tags, place, triggers):
            begin = _lexeme(trigger, "triggers")
            bodies = [
                self._tag(tag, f"{place}[{index}]", trigger)
                for index, tag in enumerate(tags)
                if tag.begin.startswith(trigger)
            ]
            body = self._rule("body", " | ".join(bodies))
            # A lazy lexeme ends as soon as it can, so the text before a trigger holds none.
            behind_text.append(f"{self._rule('trigger', f'FREE {begin}', '[lazy]')} {body}")
            at_once.append(f"{begin} {body}")
        some = self._rule("tag", " | ".join(behind_text))
        # As xgrammar has it, the one that there has to be comes first: behind free text it may
        # never.
        first = self._rule("first", " | ".join(at_once)) if at_least_one else ""
        if stop_after_first:
            return first or f"{some} | FREE"
        return f"{first} {some}* FREE"

    def _json(self, schema: dict[str, Any] | bool, place: str) -> str:
        return "%json " + written(self._schema_at(schema, place))

    def _tag(self, tag: given.Tag | given.Structure, place: str, begun: str = "") -> str:
        """`begun`: so much of its begin is there."""
        begin = _lexeme(tag.begin.removeprefix(begun), f"{place}.begin")
        end = _lexeme(tag.end, f"{place}.end")
        if isinstance(tag, given.Structure):
            return f"{begin} {self._json(tag.schema, f'{place}.schema')} {end}"
        if not isinstance(tag.content, given.AnyText):
            return f"{begin} {self.of(tag.content, f'{place}.content')} {end}"
        if not end:
            raise _wrong(f"{place}.end", "what ends any text is missing")
        # Lazy: the text holds no end.
        return f"{begin} {self._rule('text', f'FREE {end}', '[lazy]')}"

    def _tags(self, one: given.Tags, place: str) -> str:
        tags = [self._tag(tag, f"{place}.tags[{i}]") for i, tag in enumerate(one.tags)]
        some = each = self._rule("tags", " | ".join(tags))
        if not one.stop_after_first:
            some = f"{each} ({_lexeme(one.separator, f'{place}.separator')} {each})*"
        return f"({some})" if one.at_least_one else f"({some})?"

    def _rule(self, name: str, body: str, how: str = "") -> str:
        name += str(len(self.rules))
        self.rules.append(f"{name}{how}: {body}")
        return name


def _checked_triggers(
    tags: Sequence[given.Tag | given.Structure], place: str, triggers: Sequence[str]
) -> list[str]:
    """Without those that hold another one: they are never the first to be complete."""
    known = dict.fromkeys(triggers)
    first = [t for t in known if not any(o != t and o in t for o in known)]
    for index, trigger in enumerate(triggers):
        _lexeme(trigger, f"triggers[{index}]")
    for index, tag in enumerate(tags):
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            what = f"{tag.begin!r} starts with none of the triggers"
        elif not any(tag.begin.startswith(trigger) for trigger in first):
            what = f"the trigger of {tag.begin!r} holds another trigger, which is complete first"
        else:
            continue
        raise _wrong(f"{place}[{index}].begin", what)
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise _wrong("triggers", f"no tag begins with {trigger!r}")
    return first


def _lexeme(text: str, place: str) -> str:
    if not is_text(text):
        raise _wrong(place, "a lone surrogate is no character")
    return f"/{pattern_of(syntax.Literal(text))}/" if text else ""


def _wrong(place: str, what: str) -> InvalidConstraint:
    return InvalidConstraint(f"structural_tag: {place}{': ' if place else ''}{what}")
