"""Weights in floats of eight bits, as transformers, DeepSeek, Qwen and AutoFP8 write them."""

from __future__ import annotations

from rootlace.runtime.model.checkpoint.quantised.layouts import (
    ALL,
    Block,
    Numbers,
    Quantisation,
    Rule,
)
from rootlace.runtime.model.checkpoint.quantised.settings import (
    activations_remark,
    read_modules,
    read_pair,
)
from rootlace.runtime.model.families.config_reader import FLAG, TABLE, TEXT, ConfigReader, Kind

CACHE = Kind("a text or an object", lambda value: TEXT.fits(value) or TABLE.fits(value))


def read(config: ConfigReader) -> Quantisation:
    """Which modules are quantised, the file says. `weight_scale_inv` is what numbers are multiplied
    by, as `weight_scale` is."""
    size = read_pair(config, "weight_block_size")
    block = None if size is None else Block(*size)
    config.only("fmt", "e4m3")
    scheme = str(config.get("activation_scheme", TEXT, "dynamic"))
    if scheme not in ("dynamic", "static"):
        config.refuse("activation_scheme", "only dynamic and static are known")
    if config.get("scale_fmt", TEXT.or_none(), None) not in (None, "float", "ue8m0"):
        config.refuse("scale_fmt", "only float and ue8m0 are known")
    for key in ("modules_to_not_convert", "ignored_layers"):
        read_modules(config, key)
    if read_modules(config, "modules_to_convert"):
        config.refuse("modules_to_convert", "an embedding in eight bits is not supported")
    # The cache's scales are found by their names.
    config.get("kv_cache_scheme", CACHE.or_none(), None)
    read_modules(config, "kv_cache_quant_targets")
    config.get("dequantize", FLAG, False)
    scales = (".weight_scale_inv", ".weight_scale")
    layouts = tuple(Numbers("fp8_e4m3", block, scale) for scale in scales)
    return Quantisation("fp8", (Rule(ALL, layouts),), (activations_remark("fp8"),))
