"""The parts of a normal form: schemas of one type each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rootlace.runtime.constrained.schema.residual import Residual


@dataclass(frozen=True)
class Shape:
    """Values of one type, or given values.

    `said` is a schema in the keywords of the normal form, in which the schema of a part (a
    property, an item) is the conjunction of what applies to the part. `shown` is what llguidance is
    given instead where it does not take that (some of it for each), and `lost` what it then allows
    too much of.
    """

    said: dict[str, Any]
    shown: tuple[dict[str, Any], ...] = ()
    lost: frozenset[Residual] = frozenset()

    def for_mask(self) -> tuple[dict[str, Any], ...]:
        return self.shown or (self.said,)
