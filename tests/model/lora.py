"""Adapters as PEFT writes them, and the model that one stands for, by the definition of LoRA."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def write(
    folder: Path,
    model: PreTrainedModel,
    modules: str,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Write a random adapter of the modules whose whole names match the pattern `modules`; returns
    a copy of `model` with W + scale B A in place of W. `settings` are keys of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() != 2 or not re.fullmatch(modules, name):
            continue
        turned = isinstance(module, Conv1D)
        outputs, inputs = weight.t().shape if turned else weight.shape
        own = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        scale = next((a for end, a in (alphas or {}).items() if name.endswith(end)), alpha)
        scale /= math.sqrt(own) if settings.get("use_rslora") else own
        a = torch.randn(own, inputs, generator=rng) * inputs**-0.5
        b = torch.randn(outputs, own, generator=rng) * 0.3
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        with torch.no_grad():
            weight += scale * ((b @ a).t() if turned else b @ a)
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": modules,
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        "bias": "none",
        "init_lora_weights": True,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "inference_mode": True,
        "use_dora": False,
        "runtime_config": {"ephemeral_gpu_offload": False},
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
