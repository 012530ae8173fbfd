"""Which family a checkpoint is of. Every file beside this one that defines `FAMILY` is in it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from rootlace.runtime.model.families.reading import Family


@functools.cache
def families() -> dict[str, Family]:
    """Every family, by the names of its architectures."""
    package = __name__.rpartition(".")[0]
    found: dict[str, Family] = {}
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        family = getattr(importlib.import_module(f"{package}.{file.name}"), "FAMILY", None)
        if family is not None:
            found |= dict.fromkeys(family.architectures, family)
    return found
