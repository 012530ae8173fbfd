"""Sources of constraints. Sections: values of sources; suspicious sources."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from rootlace.wire.errors import InvalidConstraint

MAX_CHOICES = 65536


def parsed(kind: str, source: str) -> Any:
    """Return the value that a JSON source spells. Raises InvalidConstraint."""
    try:
        return json.loads(source, parse_constant=_not_json)
    except RecursionError:
        raise InvalidConstraint(f"{kind}: nested too deeply") from None
    except ValueError as error:
        raise InvalidConstraint(f"{kind}: not JSON: {error}") from None


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def is_text(value: str) -> bool:
    """Return whether `value` has no lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def parsed_choices(source: str) -> list[str]:
    """Return the texts of a `choices` constraint, each once. Raises InvalidConstraint."""
    choices = parsed("choices", source)
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidConstraint(f"choices: must be a JSON array of 1 to {MAX_CHOICES} strings")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidConstraint(f"choices[{index}]: must be a string of at least one character")
        if not is_text(choice):
            raise InvalidConstraint(f"choices[{index}]: a lone surrogate is no character")
    return list(dict.fromkeys(choices))


def parsed_schema(source: str) -> dict[str, Any] | bool:
    """Return the schema of a `json_schema` constraint. Raises InvalidConstraint."""
    schema = parsed("json_schema", source)
    if not isinstance(schema, dict | bool):
        raise InvalidConstraint("json_schema: must be a JSON object or boolean")
    if schema is False:
        raise InvalidConstraint("json_schema: the schema false allows nothing")
    return schema


# Suspicion ----------------------------------------------------------------------------------------
#
# Constraints of unforeseeable cost, which a child process compiles first.
#
# A constraint is suspicious if
# - its source is longer than 16,384 characters (a structural tag: than sixteen times that);
# - a pattern or grammar in it, with its counts written out (`(a{1,9}){1,9}` is 81), has more than
#   4,096 items, or nests more than 32 deep, or holds a look-around around more than 64 items;
# - a schema nests more than 32 deep, has more than 64 `$ref`, a `multipleOf` beyond 1,000 (as a
#   ratio to its own precision), or combines (`allOf`, or `$ref` or `properties` beside
#   `anyOf`/`oneOf`) alternatives in more than 4,096 ways.
#
# Each schema of a structural tag is judged by itself: many tools that are ordinary are ordinary.
# The scan is linear in the source and stops at the bounds. Ordinary constraints are far below them.


MAX_SOURCE = 16_384
MAX_ITEMS = 4_096
MAX_DEPTH = 32
MAX_LOOKAROUND_ITEMS = 64
MAX_REFERENCES = 64
MAX_MULTIPLE = 1_000
MAX_COMBINATIONS = 4_096

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


def pattern_is_suspicious(pattern: str) -> bool:
    """See above; `pattern` is a pattern or a grammar, and may be malformed."""
    if len(pattern) > MAX_SOURCE:
        return True
    items, last = [0], [0]  # per open group: its items so far, and the items of its last atom
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


def schema_is_suspicious(source: str) -> bool:
    if len(source) > MAX_SOURCE:
        return True
    try:
        return value_is_suspicious(json.loads(source))
    except (ValueError, RecursionError):
        return False  # the compiler refuses it at once


def value_is_suspicious(schema: Any) -> bool:
    """Return whether a schema, read from its JSON text, is suspicious."""
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
            # Beyond this bound the number says no more, and would only get more digits.
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
    """Return whether an automaton for its multiples has very many states: one per remainder."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    try:
        digits = Decimal(repr(number)).normalize().as_tuple().digits
    except (InvalidOperation, ValueError):
        return True
    return int("".join(map(str, digits[:9]))) > MAX_MULTIPLE
