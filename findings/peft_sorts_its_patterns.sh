#!/usr/bin/env bash
# PEFT 0.21.2 loads an adapter with another scale than it was trained with: of `alpha_pattern` (and `rank_pattern`) the first
# pattern that matches a module counts, in the order of the dictionary, and `save_pretrained` sorts the dictionary
# by its keys. With {"self_attn.q_proj": 64, "layers.0.self_attn.q_proj": 1}, rank 4, layer 0 is trained with 64 / 4 and
# comes back with 1 / 4, without a word; the logits differ. With ranks the shapes no longer fit, and loading fails.
#
# Guessed before: the most specific pattern counts, or the first one, before and after. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2

seen=$("$python" -W ignore - "$folder" 2>/dev/null <<'PYTHON'
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def scales(model):
    return [layer.self_attn.q_proj.scaling["default"] for layer in model.base_model.model.model.layers]


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**shape))
model.save_pretrained(f"{sys.argv[1]}/model")
alphas = {"self_attn.q_proj": 64, "layers.0.self_attn.q_proj": 1}
config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], alpha_pattern=alphas, init_lora_weights=False)
trained = get_peft_model(model, config).eval()
trained.save_pretrained(f"{sys.argv[1]}/adapter")
loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(f"{sys.argv[1]}/model"), f"{sys.argv[1]}/adapter")
print("trained", scales(trained), *trained.peft_config["default"].alpha_pattern)
print("loaded", scales(loaded), *loaded.peft_config["default"].alpha_pattern)
ids = torch.arange(5)[None]
with torch.no_grad():
    print("logits alike", torch.allclose(trained(ids).logits, loaded.eval()(ids).logits, atol=1e-4))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
trained [16.0, 16.0] self_attn.q_proj layers.0.self_attn.q_proj
loaded [0.25, 16.0] layers.0.self_attn.q_proj self_attn.q_proj
logits alike False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
