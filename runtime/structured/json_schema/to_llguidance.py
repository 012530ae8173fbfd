"""Weakening of a schema that llguidance refuses, until llguidance accepts the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from rootlace.runtime.structured.regex.syntax import TooLarge

# Guidance -----------------------------------------------------------------------------------------
#
# llguidance's verdicts on schemas and patterns.
#
# llguidance refuses schemas that it finds unsatisfiable, and patterns of keys that it does not find
# disjoint. So only its own verdicts count here: a right answer of `grammars.Language` would not
# help.


def accepted(schema: dict[str, Any]) -> str:
    """Return why llguidance refuses a schema; "" if it accepts the schema."""
    try:
        message = str(LLMatcher.validate_grammar(grammar_of(schema)))
    except ValueError as error:
        message = str(error)
    return message.partition(_REFUSED)[2] or message


_REFUSED = ": failed to compile JSON schema: "
_SHORT = 1 << 14


def grammar_of(schema: dict[str, Any]) -> str:
    """Return a grammar of a schema without flexible white space.

    llguidance's `grammar_from_json_schema` form takes a fifth of the time, but is read before
    llguidance lets go of the interpreter (30 ms per megabyte). So only short schemas have that
    form.
    """
    options = {**schema.get("x-guidance", {}), "whitespace_flexible": False}
    text = written({**schema, "x-guidance": options})
    if len(text) > _SHORT:
        return f"start: %json {text}"
    one = f'{{"name": "json_schema", "json_schema": {text}, "lark_grammar": null}}'
    return f'{{"grammars": [{one}], "max_tokens": null}}'


def written(value: Any) -> str:
    """Write JSON as `json.dumps` does, but without holding the interpreter until the end.
    `JSONEncoder.iterencode` would leave functions that refer in a circle."""
    if isinstance(value, dict):
        return f"{{{', '.join([f'{json.dumps(k)}: {written(v)}' for k, v in value.items()])}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join([written(one) for one in value])}]"
    return json.dumps(value)


def takes_pattern(pattern: str) -> bool:
    """Return whether llguidance accepts a pattern."""
    return _remembered(json.dumps({"type": "string", "pattern": pattern})) == ""


def nothing_matches(schema: dict[str, Any]) -> bool:
    """Return whether llguidance proves that no string satisfies a schema."""
    return _remembered(json.dumps(schema)).startswith("Unsatisfiable")


def patterns_apart(patterns: Iterable[str]) -> bool:
    """Return whether llguidance proves that no text matches two of the patterns."""
    found = {"type": "object", "patternProperties": {key: {} for key in patterns}}
    return _remembered(json.dumps(found)) == ""


@lru_cache(maxsize=512)
def _remembered(schema: str) -> str:
    return accepted(json.loads(schema))[:40]  # only its beginning matters


def string_matcher(pattern: str, **options: Any) -> LLMatcher:
    """Return a matcher of the JSON strings of a pattern, token by byte; it may have an error.
    `options` are llguidance's."""
    schema = {"type": "string", "pattern": pattern, "x-guidance": options}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher(_byte_tokenizer(), grammar, log_level=0)


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


# Weaken -------------------------------------------------------------------------------------------


Definitions = dict[str, Any]
_TOO_LARGE = "schema too large"

_STEPS = (
    ("minProperties", "maxProperties"),
    ("patternProperties",),
    ("allOf",),
    ("multipleOf",),
    ("format",),
    ("pattern",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("properties", "required", "additionalProperties", "prefixItems", "items"),
)
"""Keywords to give up, one group after the other, until llguidance accepts a shape."""


def weaken(
    root: dict[str, Any], definitions: Definitions
) -> tuple[dict[str, Any], Definitions, list[tuple[str, str]]]:
    """Drop keywords until llguidance accepts a schema: (root, definitions, lost keywords).

    `root` refers to one of the definitions; the definitions refer to each other only. A lost
    keyword comes with the name of its definition. Raises TooLarge if llguidance still refuses the
    rest.
    """
    lost: list[tuple[str, str]] = []
    refused = accepted({**root, "$defs": definitions})
    if refused and not refused.startswith(_TOO_LARGE):
        for name, definition in definitions.items():
            if _alone(definition):
                definitions[name] = _weakened(definition, name, lost)
        refused = accepted({**root, "$defs": definitions})
    if refused and not refused.startswith(_TOO_LARGE):
        # A key may have schemas both by its name and by a pattern. llguidance 1.9 joins them,
        # without an end if they are recursive, or with overlapping patterns.
        for name, definition in definitions.items():
            freed = _with_free_patterns(definition)
            if freed != definition:
                definitions[name] = freed
                lost.append((name, "patternProperties"))
        refused = accepted({**root, "$defs": definitions})
    if refused:
        raise TooLarge(refused.splitlines()[0])
    return root, definitions, list(dict.fromkeys(lost))


def _alone(definition: Any) -> str:
    """Return why llguidance refuses a definition with any parts; "" if it does not."""
    return accepted(_hollow(definition))


def _hollow(definition: Any) -> Any:
    """Replace references to other definitions by schemas that allow everything."""
    if isinstance(definition, dict):
        if "$ref" in definition:
            return {}
        return {
            key: _hollow(value) if key != "enum" else value for key, value in definition.items()
        }
    if isinstance(definition, list):
        return [_hollow(item) for item in definition]
    return definition


def _with_free_patterns(definition: dict[str, Any]) -> dict[str, Any]:
    """Allow every value under patterns of keys that stand beside named keys."""
    if "anyOf" in definition:
        return {"anyOf": [_with_free_patterns(option) for option in definition["anyOf"]]}
    if definition.keys() >= {"properties", "patternProperties"}:
        freed = dict.fromkeys(definition["patternProperties"], True)
        return {**definition, "patternProperties": freed}
    return definition


def _weakened(definition: dict[str, Any], name: str, lost: list[tuple[str, str]]) -> Any:
    if "anyOf" in definition:
        options = [
            _weakened(option, name, lost) if _alone(option) else option
            for option in definition["anyOf"]
        ]
        return {"anyOf": options}
    left = dict(definition)
    for group in _STEPS:
        given_up = [key for key in group if key in left]
        if not given_up:
            continue
        if group == ("patternProperties",):
            # Keys that match a pattern may have any value then; `additionalProperties` must not
            # forbid them.
            left.pop("additionalProperties", None)
        for key in given_up:
            del left[key]
            lost.append((name, key))
        if not _alone(left):
            return left
    lost.append((name, "enum" if "enum" in left else "type"))
    return {"type": left["type"]} if "type" in left and not _alone({"type": left["type"]}) else {}
