"""Adapters written by PEFT give the results of PEFT's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.engine.harness import Harness, greedy
from tests.model.checkpoints import configs, reference_logprobs, save

peft = pytest.importorskip("peft", reason="needs the extra `clients-all`")

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "by layer": ("qwen3", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "patterns": (
        "gemma3",
        {
            "target_modules": r".*(q_proj|up_proj)",
            "rank_pattern": {"up_proj": 5},
            "alpha_pattern": {"1.self_attn.q_proj": 2},
        },
    ),
    "minor components": (
        "llama",
        {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": "mica"},
    ),
    "joined": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "by group": ("gpt_neox", {"target_modules": "all-linear"}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "latent": ("deepseek_v3", {"target_modules": ["q_a_proj", "q_b_proj", "o_proj"]}),
    "mixtral": ("mixtral", {"target_modules": "all-linear"}),
    "olmoe": ("olmoe", {"target_modules": "all-linear"}),
    "qwen2_moe": ("qwen2_moe", {"target_modules": "all-linear"}),
    "qwen3_moe": ("qwen3_moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "gpt_oss": ("gpt_oss", {"target_modules": ["v_proj"], "target_parameters": STACKS}),
    "one stack": ("gpt_oss", {"target_modules": [], "target_parameters": STACKS[:1]}),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_s_own_adapters(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    model = save(configs()[family], tmp_path)
    changed = adapted(model, tmp_path / "a", settings)
    runner = ModelRunner.load(
        ExecutorConfig(model=str(tmp_path), adapters=(f"a={tmp_path / 'a'}",)),
        CacheConfig(block_size=4, num_blocks=300),
        max_step_tokens=512,
        max_running=4,
    )
    harness = Harness(runner, block_size=4)
    prompt = np.random.default_rng(3).integers(3, 199, 21).tolist()
    rid = harness.add(prompt, greedy(5, logprobs=True), adapter="a")
    harness.finish()
    found = harness.outcomes[rid]
    scores = reference_logprobs(changed, [*prompt, *found.token_ids])[len(prompt) - 1 : -1]
    assert scores.argmax(1).tolist() == found.token_ids
    assert np.abs(found.logprobs - scores.max(1).values.numpy()).max() < 1e-4


def adapted(model: PreTrainedModel, folder: Path, settings: dict[str, Any]) -> PreTrainedModel:
    """Return PEFT's own model with an adapter of random numbers, saved in the folder."""
    plain = reference_logprobs(model, [5, 7, 9])
    settings = {"init_lora_weights": False} | settings
    config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(1)
    changed: Any = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.4 if "lora_B" in name else parameter.shape[-1] ** -0.5)
    changed.save_pretrained(folder)
    assert (reference_logprobs(changed, [5, 7, 9]) - plain).abs().max() > 0.05
    return changed  # type: ignore[no-any-return]
