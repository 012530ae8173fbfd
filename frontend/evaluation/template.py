"""Texts with `{fields}` in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rootlace.wire.errors import InvalidRequest

_FIELD = re.compile(
    r"\{(?P<escaped>\{\w+(?:\[\w+\])*\})\}|\{(?P<name>\w+)(?P<inside>(?:\[\w+\])*)\}"
)


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """`template` with the value of each `{field}`, `{list[0]}` or `{object[key]}`; `{{field}}`
    stands for {field}, and braces around anything else for themselves.

    Raises InvalidRequest for a field that is not there.
    """

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return match["escaped"]
        found = look_up(fields, match["name"])
        for key in re.findall(r"\w+", match["inside"]):
            found = _inside(found, key, match[0])
        return str(found)

    return _FIELD.sub(value, template)


def look_up(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field. Raises InvalidRequest where there is none."""
    try:
        return fields[name]
    except KeyError:
        raise InvalidRequest(f"no {name!r}; there are: {', '.join(fields)}") from None


def _inside(found: Any, key: str, whole: str) -> Any:
    try:
        return found[int(key)] if isinstance(found, (list, tuple)) else found[key]
    except (KeyError, IndexError, TypeError, ValueError):
        raise InvalidRequest(f"{whole}: there is no {key!r} in {found!r:.60}") from None
