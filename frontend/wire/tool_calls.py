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
    tags = [
        {
            "begin": begin,
            "content": {"type": "json_schema", "json_schema": schema},
            "end": end,
        }
        for begin, schema in calls
    ]
    text = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": True,
        "stop_after_first": last,
    }
    return {"type": "structural_tag", "format": text}
