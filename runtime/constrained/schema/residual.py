"""The keywords of a schema that no mask holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rootlace.runtime.constrained.schema.check import Located


@dataclass(frozen=True, slots=True)
class Residual:
    """A keyword that has to be checked: `pointer` is its place in the schema ("#/items/not")."""

    pointer: str
    keyword: str


def notes_of(leaves: Iterable[tuple[Located, dict[str, Any]]], keyword: str) -> list[Residual]:
    """The places of a keyword among schemas (each with those of its keywords that matter)."""
    return [
        Residual(f"{located.pointer}/{keyword}", keyword)
        for located, leaf in leaves
        if keyword in leaf
    ]


def written(pointer: str, schema: Any) -> str:
    """A pointer without what we put there ourselves ("not/type!/type"): to the keyword that the
    user wrote, as far as it leads through `schema`."""
    first, *parts = pointer.split("/")
    found, node = [first], schema
    for part in parts:
        inner = _member(node, part)
        if inner is None and "!" in part and _member(node, part.partition("!")[0]) is not None:
            return "/".join([*found, part.partition("!")[0]])
        if inner is None:  # another document's
            return pointer
        found.append(part)
        (node,) = inner
    return pointer


def _member(node: Any, part: str) -> tuple[Any] | None:
    if isinstance(node, list):
        return (node[int(part)],) if part.isdecimal() and int(part) < len(node) else None
    name = part.replace("~1", "/").replace("~0", "~")
    return (node[name],) if isinstance(node, dict) and name in node else None
