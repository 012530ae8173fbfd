"""MXFP4, as gpt-oss has it."""

from __future__ import annotations

from rootlace.runtime.model.checkpoint.quantised.layouts import Blocks
from rootlace.runtime.model.checkpoint.quantised.quantisation import ALL, Quantisation, Rule
from rootlace.runtime.model.checkpoint.quantised.settings import read_modules
from rootlace.runtime.model.families.given import FLAG, Given


def read(given: Given) -> Quantisation:
    """Which modules are quantised, the file says."""
    read_modules(given, "modules_to_not_convert")
    given("dequantize", FLAG, False)
    return Quantisation("MXFP4", (Rule(ALL, (Blocks(),)),))
