"""MXFP4, as gpt-oss has it."""

from __future__ import annotations

from rootlace.runtime.model.checkpoint.quantised.layouts import ALL, Blocks, Quantisation, Rule
from rootlace.runtime.model.checkpoint.quantised.settings import read_modules
from rootlace.runtime.model.families.config_reader import FLAG, ConfigReader


def read(config: ConfigReader) -> Quantisation:
    """Which modules are quantised, the file says."""
    read_modules(config, "modules_to_not_convert")
    config.get("dequantize", FLAG, False)
    return Quantisation("MXFP4", (Rule(ALL, (Blocks(),)),))
