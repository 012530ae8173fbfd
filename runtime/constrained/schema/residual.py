"""The keywords of a schema that no mask holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rootlace.runtime.constrained.schema.check import Located
from rootlace.runtime.constrained.schema.dialect import OWN


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


def written(pointer: str) -> str:
    """A pointer as far as it leads through what the user wrote."""
    return pointer.partition(OWN)[0]
