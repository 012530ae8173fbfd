"""Adapters as PEFT writes them, and the model of equal output, by the definition of LoRA."""

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
    experts: tuple[str, ...] = (),
    **settings: Any,
) -> PreTrainedModel:
    """Write a random adapter of the modules whose whole names match the pattern `modules`; returns
    a copy of `model` with W + scale B A in place of W. `settings` are keys of its configuration.
    `experts`: also of those, one by one, by the ends of their modules' names (gate, up, down), or,
    of two, of the parameters of all of them together."""
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
    for name, module in merged.named_modules():
        if experts and hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            tensors |= _of_experts(f"base_model.model.{name}", module, experts, rank, alpha, rng)
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": rank,
        "lora_alpha": alpha,
        "peft_version": "0.21.2",
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


def _of_experts(
    name: str,
    module: Any,
    ends: tuple[str, ...],
    rank: int,
    alpha: float,
    rng: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Changes stacked experts, by what is returned as PEFT stores it. Of E experts together, A is
    [E * rank, inputs] and B [outputs, rank * E]; the outer module is that of the last parameter."""
    found = {}
    turned = getattr(module, "is_transposed", False)
    stacked = len(ends) == 2
    for at, which in enumerate(("gate_up_proj", "down_proj")):
        parameter = getattr(module, which).data
        whole = parameter.transpose(1, 2) if turned else parameter
        parts = [whole] if stacked or which == "down_proj" else whole.chunk(2, dim=1)
        for side, part in enumerate(parts):
            count, outputs, inputs = part.shape
            a = torch.randn(count, rank, inputs, generator=rng) * inputs**-0.5
            b = torch.randn(count, outputs, rank, generator=rng) * 0.3
            part += alpha / rank * b @ a
            if stacked:
                own = f"{name}{'' if at else '.base_layer'}"
                found[f"{own}.lora_A.weight"] = a.flatten(0, 1)
                found[f"{own}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
                continue
            for expert in range(count):
                own = f"{name}.{expert}.{ends[2 * at + side]}"
                found[f"{own}.lora_A.weight"] = a[expert].clone()
                found[f"{own}.lora_B.weight"] = b[expert].clone()
    return found
