"""AWQ, as AutoAWQ writes it."""

from __future__ import annotations

from rootlace.runtime.model.checkpoint.quantised.layouts import ALL, Awq, Quantisation, Rule
from rootlace.runtime.model.checkpoint.quantised.settings import (
    GPTQ_REMARKS,
    read_group,
    read_modules,
)
from rootlace.runtime.model.families.config_reader import TABLE, TEXT, ConfigReader

GEMM = ("gemm", "exllama")
"""Versions of the same files."""


def read(config: ConfigReader) -> Quantisation:
    """Which modules are quantised, the file says."""
    for key in ("version", "format"):
        if str(config.get(key, TEXT, "gemm")).lower() not in GEMM:
            config.refuse(key, "only the version gemm of AWQ is read")
    config.only("bits", 4)
    config.only("w_bit", 4)
    config.only("zero_point", True)
    group = read_group(config, "q_group_size" if "q_group_size" in config else "group_size", 128)
    read_modules(config, "modules_to_not_convert")
    # How AutoAWQ is to run the model, and what transformers copies from GPTQ's configuration.
    config.pass_over("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", *GPTQ_REMARKS)
    config.pass_over("desc_act", "sym", "lm_head")
    config.get("exllama_config", TABLE.or_none(), None)
    return Quantisation("AWQ", (Rule(ALL, (Awq(group),)),))
