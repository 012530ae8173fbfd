"""From a checked schema to one that a mask can hold, and what of it is left to check."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from rootlace.runtime.constrained.schema.check import CheckedSchema
from rootlace.runtime.constrained.schema.residual import Residual


@dataclass(frozen=True)
class Relaxed:
    schema: dict[str, Any]
    residuals: tuple[Residual, ...]


def relax(checked: CheckedSchema) -> Relaxed:
    return Relaxed({}, (Residual("#", "schema"),))
