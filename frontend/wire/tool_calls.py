"""Structural tags that hold calls of tools, which each model begins and ends in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Calls = Iterable[tuple[str, Mapping[str, Any]]]
"""For each tool: the text that begins its call, and the schema of the arguments that follow."""
Around = tuple[str, str, str]
"""What calls that stand together begin with (and so each of `Calls`), what stands between two, and
what they end with."""
LINES: Around = ("", "\n", "")


def among_text(calls: Calls, trigger: str, end: str, around: Around = LINES) -> dict[str, Any]:
    """Free text in which whatever begins with `trigger` is one of `calls`, or several together."""
    if around[0]:
        return _triggered(calls, trigger, end, around)
    structures = [{"begin": begin, "schema": schema, "end": end} for begin, schema in calls]
    return {"structures": structures, "triggers": [trigger]}


def at_least_one(
    calls: Calls, trigger: str, end: str, last: bool, around: Around = LINES
) -> dict[str, Any]:
    """One of `calls`, and behind it, unless it is the `last`, free text with more of them."""
    return _triggered(calls, trigger, end, around, at_least_one=True, stop_after_first=last)


def or_json(
    calls: Calls,
    end: str,
    schema: Mapping[str, Any] | bool,
    last: bool,
    around: Around = LINES,
    before: str = "",
    thoughts: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    """Nothing but `calls`, or `before` and what fits `schema`. `last`: the first call is the last.

    `thoughts` are what begins free text ahead of it, what ends it and what stands behind; where
    nothing begins it, there is such text, and else there may be.
    """
    together = _sequence(_const(around[0]), _several(calls, end, around, last), _const(around[2]))
    text = _either(together, _sequence(_const(before), _json(schema)))
    if thoughts is not None:
        begin, finish, then = thoughts
        free = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": finish}
        ahead = _sequence(free, _const(then))
        text = _sequence(_either(ahead, _const("")) if begin else ahead, text)
    return {"type": "structural_tag", "format": text}


def either_json(schemas: Iterable[Mapping[str, Any] | bool]) -> dict[str, Any]:
    """What fits one of `schemas`, in each of which references count from its own root."""
    return {"type": "structural_tag", "format": _either(*map(_json, schemas))}


def _triggered(
    calls: Calls, trigger: str, end: str, around: Around, **flags: bool
) -> dict[str, Any]:
    """Where calls together begin with something of their own, a tag is all of them."""
    first, _, behind = around
    if first:
        trigger = trigger if first.startswith(trigger) else first
        several = _several(calls, end, around, flags.get("stop_after_first", False))
        tags = [{"begin": first, "content": several, "end": behind}]
    else:
        tags = _tags(calls, end)
    text = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, **flags}
    return {"type": "structural_tag", "format": text}


def _several(calls: Calls, end: str, around: Around, last: bool) -> dict[str, Any]:
    """At least one of `calls`, without what is around all of them."""
    first, between, behind = around
    each = [(begin.removeprefix(first), schema) for begin, schema in calls]
    return {
        "type": "tags_with_separator",
        "tags": _tags(each, end.removesuffix(behind)),
        "separator": between,
        "at_least_one": True,
        "stop_after_first": last,
    }


def _tags(calls: Calls, end: str) -> list[dict[str, Any]]:
    return [{"begin": begin, "content": _json(schema), "end": end} for begin, schema in calls]


def _json(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def _either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": [*elements]}
