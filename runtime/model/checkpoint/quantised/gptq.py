"""GPTQ, as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

import re
from typing import Any

from rootlace.runtime.model.checkpoint.quantised.layouts import ALL, Gptq, Quantisation, Rule
from rootlace.runtime.model.checkpoint.quantised.settings import (
    GPTQ_REMARKS,
    read_group,
    read_modules,
    read_pattern,
)
from rootlace.runtime.model.families.config_reader import FLAG, TABLE, TEXT, ConfigReader, Kind

BITS = Kind("4 or 8", lambda bits: type(bits) is int and bits in (4, 8))


def read(config: ConfigReader) -> Quantisation:
    """Which modules are quantised, the file says, and in which order their columns are."""
    minus_one = _stored_minus_one(config)
    bits = config.get("bits", BITS)
    group = read_group(config, "group_size", 128)
    rules = _dynamic(config, bits, group, minus_one)
    config.only("method", "gptq")
    config.only("pack_dtype", "int32")
    config.only("is_marlin_format", False)
    config.only("use_marlin", False)
    config.flag("sym", True)
    for key in ("desc_act", "static_groups", "true_sequential", "lm_head", "act_group_aware"):
        config.get(key, FLAG.or_none(), None)
    for key in ("modules_to_not_convert", "modules_in_block_to_quantize"):
        read_modules(config, key)
    config.pass_over(*GPTQ_REMARKS)
    return Quantisation("GPTQ", (*rules, Rule(ALL, (Gptq(bits, group, minus_one),))))


def _stored_minus_one(config: ConfigReader) -> bool:
    """Whether zero points are stored less one, as in the first version of the format."""
    found = "gptq"
    for key in ("format", "checkpoint_format"):
        found = config.get(key, TEXT.or_none(), None) or found
        if found.lower() not in ("gptq", "gptq_v2"):
            config.refuse(key, "only gptq and gptq_v2 are read")
    return found.lower() == "gptq"


def _dynamic(config: ConfigReader, bits: Any, group: int | None, minus_one: bool) -> list[Rule]:
    """What is said of modules apart: by a pattern of their names, after "-:" those that are not
    quantised."""
    found: list[Rule] = []
    if not config.get("dynamic", TABLE.or_none(), None):
        return found
    modules = config.table("dynamic")
    for name in modules:
        pattern = read_pattern(modules, name, re.sub(r"^[+-]:", "", name))
        own = modules.table(name)
        if name.startswith("-:"):
            found.append(Rule(pattern))
            continue
        layout = Gptq(
            own.get("bits", BITS, bits), read_group(own, "group_size", group or -1), minus_one
        )
        for key in ("sym", "desc_act"):
            own.get(key, FLAG.or_none(), None)
        own.pass_over(*GPTQ_REMARKS)
        own.finish(frozenset())
        found.append(Rule(pattern, (layout,)))
    return found
