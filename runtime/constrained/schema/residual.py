"""What of a schema no mask holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residual:
    """A keyword that has to be checked: `pointer` is its place in the schema ("#/items/not")."""

    pointer: str
    keyword: str
