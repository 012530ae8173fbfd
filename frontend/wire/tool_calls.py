"""Structural tags that hold calls of tools, which each model begins and ends in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Calls = Iterable[tuple[str, Mapping[str, Any]]]
"""For each tool: the text that begins its call, and the schema of the arguments that follow."""


def among_text(calls: Calls, trigger: str, end: str) -> dict[str, Any]:
    """Free text in which whatever begins with `trigger` is one of `calls`."""
    structures = [{"begin": begin, "schema": schema, "end": end} for begin, schema in calls]
    return {"structures": structures, "triggers": [trigger]}


def at_least_one(calls: Calls, trigger: str, end: str, last: bool) -> dict[str, Any]:
    """One of `calls`, and behind it, unless it is the `last`, free text with more of them."""
    text = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": _tags(calls, end),
        "at_least_one": True,
        "stop_after_first": last,
    }
    return {"type": "structural_tag", "format": text}


def or_json(
    calls: Calls,
    end: str,
    schema: Mapping[str, Any] | bool,
    last: bool,
    around: tuple[str, str, str] = ("", "\n", ""),
    before: str = "",
    thoughts: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    """Nothing but `calls`, or `before` and what fits `schema`. `last`: the first call is the last.

    `around` are what all calls together begin with (and so each of `calls`), what stands between
    two, and what they end with.

    `thoughts` are what begins free text ahead of it, what ends it and what stands behind; where
    nothing begins it, there is such text, and else there may be.
    """
    first, between, behind = around
    each = [(begin.removeprefix(first), schema) for begin, schema in calls]
    some = {
        "type": "tags_with_separator",
        "tags": _tags(each, end.removesuffix(behind)),
        "separator": between,
        "at_least_one": True,
        "stop_after_first": last,
    }
    together = _sequence(_const(first), some, _const(behind))
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
