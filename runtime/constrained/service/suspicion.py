"""Which constraints are compiled in a child process first, because their cost cannot be foreseen.

A constraint is suspicious if
- its source is longer than 16,384 characters;
- a pattern or grammar in it, with its counts written out (`(a{1,9}){1,9}` is 81), has more than
  4,096 items, or nests more than 32 deep, or holds a look-around around more than 64 items;
- a schema nests more than 32 deep, has more than 64 `$ref`, a `multipleOf` beyond 1,000 (as a ratio
  to its own precision), or combines (`allOf`, or `$ref` or `properties` beside `anyOf`/`oneOf`)
  alternatives in more than 4,096 ways.

The scan is linear in the source and stops at the bounds. Ordinary constraints are far below them.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from rootlace.wire.protocol import Constraint

MAX_SOURCE = 16_384
MAX_ITEMS = 4_096
MAX_DEPTH = 32
MAX_LOOKAROUND_ITEMS = 64
MAX_REFERENCES = 64
MAX_MULTIPLE = 1_000
MAX_COMBINATIONS = 4_096

_COUNT = re.compile(r"\{\s*(\d{0,9})\s*(?:,\s*(\d{0,9})\s*)?\}")


def is_suspicious(constraint: Constraint) -> bool:
    """Whether compiling it may take long or much memory."""
    if len(constraint.source) > MAX_SOURCE:
        return True
    if constraint.kind in ("regex", "ebnf"):
        return pattern_is_suspicious(constraint.source)
    if constraint.kind == "choices":
        return False
    try:
        value = json.loads(constraint.source)
    except (ValueError, RecursionError):
        return False  # it will be refused at once
    return _SchemaScan().exceeds(value)


def pattern_is_suspicious(pattern: str) -> bool:
    """See the module; `pattern` may be malformed."""
    totals, last, around = [0], [0], 0
    i = 0
    while i < len(pattern):
        character = pattern[i]
        if character == "\\":
            totals[-1] += 1
            last[-1] = 1
            i += 2
            continue
        if character == "[":
            i = _class_end(pattern, i)
            totals[-1] += 1
            last[-1] = 1
            continue
        if character == "(":
            around += pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), i)
            totals.append(0)
            last.append(0)
            if len(totals) > MAX_DEPTH:
                return True
        elif character == ")":
            if len(totals) > 1:
                inside = max(totals.pop(), 1)
                last.pop()
                totals[-1] += inside
                last[-1] = inside
        elif character == "{" and (count := _COUNT.match(pattern, i)):
            most = max(int(number or 0) for number in (count[1], count[2] or ""))
            totals[-1] += last[-1] * max(most - 1, 0)
            last[-1] *= max(most, 1)
            i = count.end()
            if totals[-1] > MAX_ITEMS:
                return True
            continue
        elif character not in "*+?|^$ \n":
            totals[-1] += 1
            last[-1] = 1
        i += 1
    items = sum(totals)
    return items > MAX_ITEMS or (around > 0 and items > MAX_LOOKAROUND_ITEMS)


def _class_end(pattern: str, start: int) -> int:
    i = start + 1
    if pattern.startswith("^", i):
        i += 1
    if pattern.startswith("]", i):
        i += 1
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1


class _SchemaScan:
    """One walk over a schema, without recursion."""

    def __init__(self) -> None:
        self._references = 0
        self._combinations = 1
        self._combines = False

    def exceeds(self, value: Any) -> bool:
        stack = [(value, 0)]
        while stack:
            node, depth = stack.pop()
            if depth > MAX_DEPTH:
                return True
            if isinstance(node, list):
                stack += [(item, depth + 1) for item in node if isinstance(item, dict | list)]
            elif isinstance(node, dict):
                if self._object_exceeds(node):
                    return True
                stack += [
                    (item, depth + 1) for item in node.values() if isinstance(item, dict | list)
                ]
        return self._combines and self._combinations > MAX_COMBINATIONS

    def _object_exceeds(self, node: dict[str, Any]) -> bool:
        alternatives = [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list)]
        for options in alternatives:
            # Beyond this the number says no more, and would only grow in digits.
            self._combinations = min(self._combinations * max(len(options), 1), 2**62)
        combined = len(alternatives) + ("$ref" in node) + ("properties" in node)
        if isinstance(node.get("allOf"), list) or (alternatives and combined > 1):
            self._combines = True
        self._references += "$ref" in node or "$dynamicRef" in node
        if self._references > MAX_REFERENCES:
            return True
        patterns = [node.get("pattern")]
        if isinstance(node.get("patternProperties"), dict):
            patterns += node["patternProperties"]
        if any(isinstance(p, str) and pattern_is_suspicious(p) for p in patterns):
            return True
        return _is_large_multiple(node.get("multipleOf"))


def _is_large_multiple(number: Any) -> bool:
    """Whether an automaton for its multiples has very many states: one per remainder."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    try:
        digits = Decimal(repr(number)).normalize().as_tuple().digits
    except (InvalidOperation, ValueError):
        return True
    return int("".join(map(str, digits[:9]))) > MAX_MULTIPLE
