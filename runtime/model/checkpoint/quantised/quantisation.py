"""How a checkpoint's modules are stored, by what its configuration says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rootlace.runtime.model.checkpoint.quantised.layouts import Layout


@dataclass(frozen=True)
class Rule:
    """Modules whose names begin as `pattern` says are stored in the first of these layouts that
    the file has them in; where it has none, they are dense."""

    pattern: re.Pattern[str]
    layouts: tuple[Layout, ...] = ()


ALL = re.compile("")
"""Every module."""


@dataclass(frozen=True)
class Quantisation:
    """`method` is the name of what wrote the checkpoint. A module follows the first rule whose
    pattern its name fits. `remarks` are for the log."""

    method: str
    rules: tuple[Rule, ...]
    remarks: tuple[str, ...] = ()

    @property
    def codes(self) -> frozenset[str]:
        """What weights may be read as: some of `rootlace.kernels.weights.CODES`."""
        return frozenset(layout.codes for rule in self.rules for layout in rule.layouts)

    def layouts(self, module: str) -> Sequence[Layout]:
        """What the module may be stored in."""
        return next((rule.layouts for rule in self.rules if rule.pattern.match(module)), ())
