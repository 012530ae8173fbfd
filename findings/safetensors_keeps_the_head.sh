#!/usr/bin/env bash
# safetensors 0.8.0: `save_model` of a model with tied embeddings writes the shared tensor once, as `lm_head.weight`: the
# first of its names in the order of letters, not the one that the model has first. `model.embed_tokens.weight` stands
# in `__metadata__` alone, and a reader that looks only for embeddings finds none. `save_pretrained` of transformers
# 5.23.0 keeps `model.embed_tokens.weight`.
#
# Guessed before: the embeddings are kept, as transformers keeps them. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0 safetensors==0.8.0

seen=$("$python" -W ignore - "$folder" 2>/dev/null <<'PYTHON'
import sys

from safetensors import safe_open
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
print("the model's names:", *[name for name in model.state_dict() if name.startswith(("lm", "model.e"))])
model.save_pretrained(sys.argv[1])
for writer in ("save_pretrained", "save_model"):
    file = f"{sys.argv[1]}/model.safetensors"
    if writer == "save_model":
        save_model(model, file)
    with safe_open(file, "pt") as opened:
        kept = [name for name in opened.keys() if name.startswith(("lm", "model.e"))]
        print(writer, *kept, opened.metadata())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
the model's names: model.embed_tokens.weight lm_head.weight
save_pretrained model.embed_tokens.weight {'format': 'pt'}
save_model lm_head.weight {'model.embed_tokens.weight': 'lm_head.weight'}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
