"""The weights of a model that transformers runs."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import transformers
from transformers import PreTrainedModel

from rootlace.kernels import KernelSet
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import Progress
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.families.spec import Foreign
from rootlace.runtime.model.foreign.agreement import check_agreement
from rootlace.runtime.model.foreign.attention import ATTENTION
from rootlace.runtime.model.foreign.decoder import ForeignDecoder
from rootlace.runtime.model.foreign.head import Head
from rootlace.runtime.model.foreign.recording import first_line
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.wire.errors import UnsupportedModel

log = logging.getLogger(__name__)


def load_foreign(
    config: ModelConfig,
    foreign: Foreign,
    dtype: torch.dtype,
    device: torch.device,
    rotary: RotaryEmbedding,
    kernels: KernelSet,
    kv_dtype: torch.dtype,
    progress: Progress | None,
) -> ForeignDecoder:
    """Read the weights, and compare a few steps with transformers' own. Raises
    `UnsupportedModel`."""
    log.info(
        "%s: %s is run by transformers' own modules (%s), with our cache and attention",
        config.path,
        foreign.architecture,
        transformers.__version__,
    )
    if progress is not None:
        progress("weights", 0.0)
    model = _load(config, foreign, dtype).to(device)
    base, head = model.base_model, Head(model)
    decoder = ForeignDecoder(config.spec, foreign, base, head, kernels)
    try:
        check_agreement(config, decoder, base, rotary, kernels)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{config.file}: its modules cannot compute a step: {first_line(error)}"
        ) from error
    codes = kv_pool.codes(config.spec.attention, kv_dtype)
    return decoder if codes is None else replace(decoder, codes=codes)


def _load(config: ModelConfig, foreign: Foreign, dtype: torch.dtype) -> PreTrainedModel:
    """Strict, where transformers would go on with random numbers."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = getattr(transformers, foreign.architecture).from_pretrained(
            config.path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise UnsupportedModel(f"{config.path}: {first_line(error)}") from error
    for what, key in (
        ("weights are missing", "missing_keys"),
        ("weights that the architecture does not have", "unexpected_keys"),
        ("weights of other shapes", "mismatched_keys"),
    ):
        names = sorted(map(str, found[key]))
        if names:
            some = ", ".join(names[:5]) + (" ..." if names[5:] else "")
            raise UnsupportedModel(f"{config.path}: {what}: {some}")
    loaded: PreTrainedModel = model
    return loaded
