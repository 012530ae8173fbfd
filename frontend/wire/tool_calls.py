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
    """Nothing but `calls`, at least one of them. `last`: the first is the last, too."""
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
    before: str = "",
    thoughts: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    """Nothing but `calls`, or `before` and what fits `schema`. `last`: the first call is the last.

    `thoughts` are what begins free text ahead of it, what ends it and what stands behind; where
    nothing begins it, there is such text, and else there may be.
    """
    some = {
        "type": "tags_with_separator",
        "tags": _tags(calls, end),
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": last,
    }
    answer = [_const(before), _json(schema)] if before else [_json(schema)]
    text = {"type": "or", "elements": [some, {"type": "sequence", "elements": answer}]}
    if thoughts is not None:
        begin, finish, behind = thoughts
        free = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": finish}
        ahead = {"type": "sequence", "elements": [free, _const(behind)]}
        if begin:
            ahead = {"type": "or", "elements": [ahead, _const("")]}
        text = {"type": "sequence", "elements": [ahead, text]}
    return {"type": "structural_tag", "format": text}


def either_json(schemas: Iterable[Mapping[str, Any] | bool]) -> dict[str, Any]:
    """What fits one of `schemas`, in each of which references count from its own root."""
    elements = [_json(schema) for schema in schemas]
    return {"type": "structural_tag", "format": {"type": "or", "elements": elements}}


def _tags(calls: Calls, end: str) -> list[dict[str, Any]]:
    return [{"begin": begin, "content": _json(schema), "end": end} for begin, schema in calls]


def _json(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
