"""Cases that nothing satisfies, because a keyword is both required and negated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootlace.runtime.constrained.schema.check import Located
from rootlace.runtime.constrained.schema.dialect import UNMET

_ALONE = frozenset(("pattern", "multipleOf", "uniqueItems", "propertyNames"))
"""Keywords that mean the same whatever stands beside them."""


def contradiction(leaves: Sequence[tuple[Located, dict[str, Any]]]) -> str:
    """The place of a keyword that is both required and negated; "" if none is found."""
    for located, leaf in leaves:
        keyword, value = leaf.get(UNMET, ("", None))
        if keyword not in _ALONE:
            continue
        for other, wanted in leaves:
            same = located.resolver is other.resolver or not isinstance(value, dict)
            if same and keyword in wanted and _implies(keyword, wanted[keyword], value):
                return located.pointer
    return ""


def _implies(keyword: str, given: Any, value: Any) -> bool:
    """Whether all that satisfies the keyword with one value does with another."""
    if keyword == "multipleOf" and isinstance(given, int) and isinstance(value, int):
        return given % value == 0
    return bool(given == value)
