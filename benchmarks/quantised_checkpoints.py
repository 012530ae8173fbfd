"""A checkpoint with its products' weights quantised, as other engines read it: random models are
rounded to the nearest, no data is looked at.

`w8a8`: compressed-tensors, integers of eight bits with a scale for each output, activations
rounded to eight bits for each token. `awq`: AWQ's version gemm, four bits with zero points in
groups of 128.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
GROUP = 128


def make_quantised(name: str, folder: Path, target: Path) -> Path:
    """Write the checkpoint `folder` to `target` in the format `name`, unless it exists."""
    if (target / "config.json").exists():
        return target
    settings, write = SCHEMES[name]
    target.mkdir(parents=True, exist_ok=True)
    stored: Tensors = {}
    for tensor, weight in load_file(folder / WEIGHTS).items():
        module = tensor.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[tensor] = weight
            continue
        stored |= {f"{module}.{part}": found.contiguous() for part, found in write(weight).items()}
    save_file(stored, target / WEIGHTS, {"format": "pt"})
    for file in folder.glob("*.json*"):
        if file.name not in (WEIGHTS, "config.json"):
            shutil.copyfile(file, target / file.name)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def w8a8(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    values = (weight.float() / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}


def awq(weight: torch.Tensor) -> Tensors:
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, top = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((top - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    values = (groups / scale.float() + zero).round().clamp(0, 15).flatten(1)
    return {
        "qweight": _packed(values.t()),
        "qzeros": _packed(zero[..., 0].t()),
        "scales": scale[..., 0].t(),
    }


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Pack [n, m] integers of four bits -> int32 [n, m / 8], in AWQ's order of columns."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    digits = values.to(torch.int64).unflatten(1, (-1, 8))[:, :, order]
    words = (digits << (4 * torch.arange(8))).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


_INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = {
    "w8a8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _INTEGERS | {"strategy": "channel", "dynamic": False},
                    "input_activations": _INTEGERS | {"strategy": "token", "dynamic": True},
                }
            },
        },
        w8a8,
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        awq,
    ),
}
