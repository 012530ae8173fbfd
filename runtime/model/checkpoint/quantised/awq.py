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


def read(given: ConfigReader) -> Quantisation:
    """Which modules are quantised, the file says."""
    for key in ("version", "format"):
        if str(given(key, TEXT, "gemm")).lower() not in GEMM:
            given.refuse(key, "only the version gemm of AWQ is read")
    given.only("bits", 4)
    given.only("w_bit", 4)
    given.only("zero_point", True)
    group = read_group(given, "q_group_size" if "q_group_size" in given else "group_size", 128)
    read_modules(given, "modules_to_not_convert")
    # How AutoAWQ is to run the model, and what transformers copies from GPTQ's configuration.
    given.pass_over("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", *GPTQ_REMARKS)
    given.pass_over("desc_act", "sym", "lm_head")
    given("exllama_config", TABLE.or_none(), None)
    return Quantisation("AWQ", (Rule(ALL, (Awq(group),)),))
