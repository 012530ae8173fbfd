"""Which constraints are compiled in a child process first, because their cost cannot be foreseen.

A constraint is suspicious if
- its source is longer than 16,384 characters (a structural tag: than sixteen times that);
- a pattern or grammar in it, with its counts written out (`(a{1,9}){1,9}` is 81), has more than
  4,096 items, or nests more than 32 deep, or holds a look-around around more than 64 items;
- a schema nests more than 32 deep, has more than 64 `$ref`, a `multipleOf` beyond 1,000 (as a ratio
  to its own precision), or combines (`allOf`, or `$ref` or `properties` beside `anyOf`/`oneOf`)
  alternatives in more than 4,096 ways.

Each schema of a structural tag is judged by itself: many tools that are ordinary are ordinary.
The scan is linear in the source and stops at the bounds. Ordinary constraints are far below them.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from rootlace.wire.protocol import Constraint

MAX_SOURCE = 16_384
MAX_TAG = 16 * MAX_SOURCE
MAX_ITEMS = 4_096
MAX_DEPTH = 32
MAX_LOOKAROUND_ITEMS = 64
MAX_REFERENCES = 64
MAX_MULTIPLE = 1_000
MAX_COMBINATIONS = 4_096

_SCHEMAS = ("json_schema", "schema")
"""The keys under which a structural tag has them."""
# Possessive blanks: tried in every split, many of them would take cubic time.
_PIECE = re.compile(
    r"""
      \\.?
    | \[ \^? \]? (?: [^]\\] | \\.? )* \]?
    | (?P<count> \{ \s*+ (\d{0,9}) \s*+ (?: , \s*+ (\d{0,9}) \s*+ )? \} )
    | (?P<group> \( ) (?= (?P<look> \? <? [=!] )? )
    | .""",
    re.VERBOSE | re.DOTALL,
)


def is_suspicious(constraint: Constraint) -> bool:
    """Whether compiling it may take long or much memory."""
    is_tag = constraint.kind == "structural_tag"
    if len(constraint.source) > (MAX_TAG if is_tag else MAX_SOURCE):
        return True
    if constraint.kind in ("regex", "ebnf"):
        return pattern_is_suspicious(constraint.source)
    if constraint.kind == "choices":
        return False
    try:
        value = json.loads(constraint.source)
    except (ValueError, RecursionError):
        return False  # it will be refused at once
    if not is_tag:
        return _schema_is_suspicious(value)
    schemas = _schemas_of_tag(value)
    return schemas is None or any(
        len(json.dumps(schema)) > MAX_SOURCE or _schema_is_suspicious(schema) for schema in schemas
    )


def _schemas_of_tag(tag: Any) -> list[Any] | None:
    """None where it nests too deep."""
    found, stack = [], [(tag, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            return None
        if isinstance(node, dict):
            found += [node[key] for key in _SCHEMAS if key in node]
        inner = node.items() if isinstance(node, dict) else ((None, item) for item in node)
        stack += [
            (item, depth + 1)
            for key, item in inner
            if key not in _SCHEMAS and isinstance(item, dict | list)
        ]
    return found


def pattern_is_suspicious(pattern: str) -> bool:
    """See the module; `pattern` may be malformed."""
    items, last = [0], [0]  # per open group: its items so far, and those of its last atom
    looks = 0
    for piece in _PIECE.finditer(pattern):
        if piece["group"]:
            looks += piece["look"] is not None
            items.append(0)
            last.append(0)
            if len(items) > MAX_DEPTH:
                return True
        elif piece["count"]:
            most = max(int(number or 0) for number in piece.group(2, 3))
            items[-1] += last[-1] * max(most - 1, 0)
            last[-1] *= max(most, 1)
            if items[-1] > MAX_ITEMS:
                return True
        elif piece[0] == ")":
            if len(items) > 1:
                last.pop()
                last[-1] = max(items.pop(), 1)
                items[-1] += last[-1]
        elif piece[0] not in "*+?|^$ \n":
            items[-1] += 1
            last[-1] = 1
    return sum(items) > MAX_ITEMS or (looks > 0 and sum(items) > MAX_LOOKAROUND_ITEMS)


def _schema_is_suspicious(schema: Any) -> bool:
    references, combinations, combines = 0, 1, False
    stack = [(schema, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            return True
        if isinstance(node, list):
            stack += [(item, depth + 1) for item in node if isinstance(item, dict | list)]
        if not isinstance(node, dict):
            continue
        stack += [(item, depth + 1) for item in node.values() if isinstance(item, dict | list)]
        alternatives = [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list)]
        for options in alternatives:
            # Beyond this the number says no more, and would only grow in digits.
            combinations = min(combinations * max(len(options), 1), 2**62)
        beside = len(alternatives) + ("$ref" in node) + ("properties" in node)
        combines |= isinstance(node.get("allOf"), list) or (bool(alternatives) and beside > 1)
        references += "$ref" in node or "$dynamicRef" in node
        patterns = [node.get("pattern")]
        if isinstance(node.get("patternProperties"), dict):
            patterns += node["patternProperties"]
        if references > MAX_REFERENCES or _is_large_multiple(node.get("multipleOf")):
            return True
        if any(isinstance(p, str) and pattern_is_suspicious(p) for p in patterns):
            return True
    return combines and combinations > MAX_COMBINATIONS


def _is_large_multiple(number: Any) -> bool:
    """Whether an automaton for its multiples has very many states: one per remainder."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    try:
        digits = Decimal(repr(number)).normalize().as_tuple().digits
    except (InvalidOperation, ValueError):
        return True
    return int("".join(map(str, digits[:9]))) > MAX_MULTIPLE
