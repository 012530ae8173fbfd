"""Schemas as regex trees, and random texts of these."""

import random
from typing import Any

from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.runtime.structured.regex.syntax import (
    NOTHING,
    Chars,
    Concat,
    Either,
    Graph,
    Literal,
    Look,
    Regex,
    Repeat,
)
from rootlace.wire.errors import InvalidConstraint


def regex_of_schema(schema: Any, whitespace: str = "compact") -> Regex | None:
    """The regular form of a schema; None where it has none, or the schema is not well-formed."""
    try:
        return PreparedSchema(schema, {}).regex(whitespace)
    except InvalidConstraint as error:
        return NOTHING if "nothing satisfies" in str(error) else None


def draw(regex: Regex, source: random.Random) -> str:
    """Draw one text. Ends of ranges and extreme counts come more often than by chance."""
    match regex:
        case Literal(text):
            return text
        case Chars(ranges):
            low, high = source.choice(ranges)
            kind = source.randrange(4)
            return chr(low if kind == 0 else high if kind == 1 else source.randint(low, high))
        case Concat(parts):
            return "".join(draw(part, source) for part in parts)
        case Either(options):
            return draw(source.choice(options), source)
        case Repeat(item, least, most):
            top = least + 4 if most is None else most
            kind = source.randrange(4)
            count = least if kind == 0 else min(top, least + source.randrange(5))
            if kind == 1:
                count = top
            return "".join(draw(item, source) for _ in range(count))
        case Graph(edges, accepting):
            drawn, state = "", 0
            while not accepting[state] or (edges[state] and source.randrange(4)):
                label, state = source.choice(edges[state])
                drawn += draw(label, source)
            return drawn
        case Look():
            raise AssertionError("no look-ahead is written for schemas")
