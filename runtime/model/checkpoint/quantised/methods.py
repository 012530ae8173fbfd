"""A `quantization_config`: which method wrote the checkpoint, and how its modules are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from rootlace.runtime.model.checkpoint.quantised import (
    awq,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
)
from rootlace.runtime.model.checkpoint.quantised.layouts import Quantisation
from rootlace.runtime.model.families.config_reader import FLAG, TABLE, TEXT, ConfigReader

METHODS: dict[str, Callable[[ConfigReader], Quantisation | None]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "mxfp4": mxfp4.read,
}

INSTEAD = (
    f"only those of {', '.join(METHODS)}: take such a version of the model, or the one that is not "
    "quantised"
)

OTHERS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound's own format (it also writes auto_gptq and auto_awq, which are read)",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "NVIDIA's ModelOpt",
    "quanto": "Quanto",
    "quark": "AMD's Quark",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Methods that are not read, in words."""

KEY = "quantization_config"
MLX = "quantization"
"""Where MLX says it."""


def read_quantisation(config: ConfigReader) -> Quantisation | None:
    """How the modules of the checkpoint with this `config.json` are stored; None: as they are.

    Raises `UnsupportedModel`, naming the method or the key, for what is not read.
    """
    if config.get(MLX, TABLE.or_none(), None):
        config.refuse(MLX, f"weights of MLX cannot be read, {INSTEAD}")
    if not config.get(KEY, TABLE.or_none(), None):
        return None
    settings = config.table(KEY)
    method = settings.get("quant_method", TEXT, "") or _unnamed(settings)
    if method not in METHODS:
        what = f"weights of {OTHERS[method]}" if method in OTHERS else "weights of this method"
        settings.refuse("quant_method", f"{what} cannot be read, {INSTEAD}")
    found = METHODS[method](settings)
    settings.finish(frozenset())
    return found


def _unnamed(settings: ConfigReader) -> NoReturn:
    """Refuse a configuration that does not name its method."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if settings.get(key, FLAG, False):
            settings.refuse(key, f"weights of bitsandbytes cannot be read, {INSTEAD}")
    settings.refuse("quant_method", f"it does not say by which method, {INSTEAD}")
