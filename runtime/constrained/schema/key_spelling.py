"""How a mask lets strings be spelt, so that no key stands there under another spelling.

llguidance tells the keys that a schema names from all others by their text as JSON writes it. A
key spelt with an escape that it does not need (`"\\u0061"` for `"a"`) would pass for another one,
whatever the schema says of it. So where it matters, no character is written as `\\u` and four
digits; control characters that have no escape of their own (all but `\\n \\r \\b \\t \\f`) are then
written in no string but those that the schema spells out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rootlace.runtime.constrained.schema.dialect import subschemas
from rootlace.runtime.constrained.schema.guidance import string_matcher

OPTIONS = {"json_allowed_escapes": 'nrbtf\\"'}
"""llguidance's option for it."""
_MAY_NEED_CONTROLS = re.compile(r"[\x00-\x1f]|\\[xucv0]|\[\^")


def tells_keys_apart(schema: Any) -> bool:
    """Whether it has an object in which one key has another schema than others."""
    return any(_is_told(part) for part in _dicts(schema))


def has_open_keys(mask: dict[str, Any]) -> bool:
    """Whether keys may come in some value that the schema of a mask does not name: llguidance does
    not know them apart, so one could come twice."""
    return any(map(_is_open, _within(mask)))


def keywords_within(mask: dict[str, Any]) -> set[str]:
    """All that are in use in the schema of a mask."""
    return {keyword for schema in _within(mask) if isinstance(schema, dict) for keyword in schema}


def _within(mask: dict[str, Any]) -> Iterator[Any]:
    """The schemas in it, the booleans among them."""
    queue: list[Any] = [mask]
    while queue:
        schema = queue.pop()
        yield schema
        queue += [below for _, below in subschemas(schema)] if isinstance(schema, dict) else ()


def _is_open(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    if "$ref" in schema or "anyOf" in schema or "enum" in schema:
        return False
    types = schema.get("type", ("array", "object"))
    closed = schema.get("additionalProperties", True) is False and "patternProperties" not in schema
    if "object" in types and not closed:
        return True
    most = schema.get("maxItems", math.inf)
    return "array" in types and "items" not in schema and most > len(schema.get("prefixItems", ()))


def needs_controls(schema: Any) -> bool:
    """Whether some pattern in it matches control characters only."""
    return any(
        _MAY_NEED_CONTROLS.search(pattern) is not None and _is_lost(pattern)
        for part in _dicts(schema)
        for pattern in _patterns(part)
    )


def _is_told(shape: dict[str, Any]) -> bool:
    names, patterns = shape.get("properties", {}), shape.get("patternProperties", {})
    if not isinstance(names, dict) or not isinstance(patterns, dict) or not (names or patterns):
        return False
    closed = shape.get("additionalProperties", True) is False
    return not closed or (bool(patterns) and any(min(name, default=" ") < " " for name in names))


def _patterns(shape: dict[str, Any]) -> Iterator[str]:
    if isinstance(shape.get("pattern"), str):
        yield shape["pattern"]
    if isinstance(shape.get("patternProperties"), dict):
        yield from shape["patternProperties"]


def _dicts(schema: Any) -> Iterator[dict[str, Any]]:
    """The objects in it; those among values (`enum`) are left out."""
    queue = [schema]
    while queue:
        part = queue.pop()
        if isinstance(part, dict):
            yield part
            queue += [below for key, below in part.items() if key not in ("enum", "const")]
        elif isinstance(part, list):
            queue += part


@lru_cache(maxsize=1024)
def _is_lost(pattern: str) -> bool:
    """Whether no string that matches can be written without `\\u`."""
    return string_matcher(pattern, **OPTIONS).try_consume_tokens([ord('"')]) != 1
