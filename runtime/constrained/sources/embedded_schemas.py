"""JSON schemas inside a Lark grammar (`%json {…}`): as exact as those that stand alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# What may contain the word without meaning it: strings, comments, regular expressions.
_TOKEN = re.compile(
    r"""
      "(?:\\.|[^"\\\n])*"
    | //[^\n]* | \#[^\n]*
    | /(?:\\.|[^/\\\n])+/
    | (?P<json>%json\s*)(?=\{)
    """,
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()


def with_exact_schemas(lark: str, exact: Callable[[int, dict[str, Any]], dict[str, Any]]) -> str:
    """The grammar with each schema replaced by `exact(line, schema)`; lines stay where they are.

    What is no JSON is left for llguidance to complain about.
    """
    parts: list[str] = []
    position = 0
    while (found := _TOKEN.search(lark, position)) is not None:
        end = found.end()
        if found["json"] is not None:
            try:
                schema, end = _DECODER.raw_decode(lark, found.end())
            except (ValueError, RecursionError):
                return "".join(parts) + lark[position:]
            line = lark.count("\n", 0, found.start()) + 1
            replaced = json.dumps(exact(line, schema))
            breaks = "\n" * lark.count("\n", found.end(), end)
            parts += [lark[position : found.end()], replaced, breaks]
        else:
            parts.append(lark[position:end])
        position = end
    return "".join(parts) + lark[position:]


def schemas_of_grammar(lark: str) -> list[str]:
    """The schemas in a grammar, each as JSON text."""
    found: list[str] = []

    def note(line: int, schema: dict[str, Any]) -> dict[str, Any]:
        found.append(json.dumps(schema))
        return schema

    with_exact_schemas(lark, note)
    return found


def names_tokens(lark: str) -> bool:
    """Whether a grammar has tokens of the vocabulary in it (`<|name|>`, `<[id]>`)."""
    bare = _TOKEN.sub(lambda found: found["json"] or "", with_exact_schemas(lark, lambda *_: {}))
    return "<|" in bare or "<[" in bare
