#!/usr/bin/env bash
# AMD Quark 0.13 exports AWQ with its eight weights of a number in either of two orders. With `custom_mode="awq"` and
# `pack_method="order"` it writes `quant_method: awq`, `version: gemm` and the same names, shapes and types as with "reorder";
# but of a number of 32 bits, neighbours stand in the order 0 1 2 3 4 5 6 7, where AWQ's is 0 2 4 6 1 3 5 7. Only the key
# `pack_method`, which AWQ does not have, tells the two apart: a reader that passes it over permutes outputs, without a word.
#
# Guessed before: `quant_method: awq` means AWQ's order, and `pack_method` changes the export of `quark` alone. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.5.4 accelerate==1.15.0 onnx onnxslim onnxscript evaluate datasets pandas plotly joblib psutil pydantic sentencepiece zstandard ninja tqdm rich scipy
"$python" -m pip install --quiet --disable-pip-version-check --no-deps amd-quark==0.13

cd "$folder"
seen=$("$python" -W ignore - 2>"$folder/log" <<'PYTHON' | grep '^seen: '
import json

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained("model")
tokens = [torch.arange(16) + at for at in range(4)]
stored = {}
for order in ("reorder", "order"):
    model = LlamaForCausalLM.from_pretrained("model")
    settings = LLMTemplate.get("llama").get_config(scheme="uint4_wo_128", algorithm=["awq"], exclude_layers=["lm_head"])
    quantizer = ModelQuantizer(settings)
    model = quantizer.quantize_model(model, torch.utils.data.DataLoader(tokens))
    export_safetensors(quantizer.freeze(model), order, custom_mode="awq", weight_format="real_quantized", pack_method=order)
    stored[order] = load_file(f"{order}/model.safetensors")
    config = json.load(open(f"{order}/config.json"))["quantization_config"]
    print(f"seen: {order}:", {key: config[key] for key in ("quant_method", "version", "pack_method")})
one, other = (stored[order]["model.layers.0.self_attn.q_proj.qweight"] for order in stored)
print("seen: names alike", stored["order"].keys() == stored["reorder"].keys(), "shapes alike", one.shape == other.shape)


def integers(words, order):
    return (words.unsqueeze(-1) >> torch.tensor([4 * place for place in order]) & 15).flatten(1)


awq, plain = (0, 4, 1, 5, 2, 6, 3, 7), range(8)
print("seen: in AWQ's order", torch.equal(integers(one, awq), integers(other, awq)))
print("seen: each in its own", torch.equal(integers(one, awq), integers(other, plain)))
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
seen: reorder: {'quant_method': 'awq', 'version': 'gemm', 'pack_method': 'reorder'}
seen: order: {'quant_method': 'awq', 'version': 'gemm', 'pack_method': 'order'}
seen: names alike True shapes alike True
seen: in AWQ's order False
seen: each in its own True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
