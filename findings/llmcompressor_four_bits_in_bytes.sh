#!/usr/bin/env bash
# llm-compressor 0.14.0.1 writes weights of four bits in a byte each, where activations are quantised too. Its schemes W4A8 and
# W4AFP8 (and W4A4, W2A8 ...) have the same weights as W4A16, and files of twice the size: the format is `int-quantized`,
# whose tensor is int8 with numbers from -8 to 7. W4A16 is `pack-quantized`, eight weights in an int32. A reader that goes
# by `num_bits: 4` looks for packed weights that are not there.
#
# Guessed before: four bits are packed, whatever activations are. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 compressed-tensors==0.20.1 accelerate==1.15.0 loguru pydantic datasets nvidia-ml-py pyyaml requests
"$python" -m pip install --quiet --disable-pip-version-check --no-deps llmcompressor==0.14.0.1

cd "$folder"
seen=$("$python" -W ignore - 2>"$folder/log" <<'PYTHON' | grep '^seen: '
import json

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

shape = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained("model")
tokens = Tokenizer(models.WordLevel({f"t{n}": n for n in range(64)}, "t0"))
PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained("model")
for scheme in ("W4A16", "W4A8", "W4AFP8", "W2A8"):
    model = LlamaForCausalLM.from_pretrained("model")
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", ignore=["lm_head"], scheme=scheme))
    model.save_pretrained(scheme)
    form = json.load(open(f"{scheme}/config.json"))["quantization_config"]["format"]
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = {key: tensor for key, tensor in load_file(f"{scheme}/model.safetensors").items() if key in (name, f"{name}_packed")}
    (weight,) = stored.values()
    ends = f", {weight.min()} to {weight.max()}" if name in stored else ""
    print(f"seen: {scheme}: {form}, {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}{ends}")
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
seen: W4A16: pack-quantized, int32 [128, 16]
seen: W4A8: int-quantized, int8 [128, 128], -8 to 7
seen: W4AFP8: int-quantized, int8 [128, 128], -8 to 7
seen: W2A8: int-quantized, int8 [128, 128], -2 to 1
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
