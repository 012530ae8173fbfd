#!/usr/bin/env bash
# llama.cpp's `convert_lora_to_gguf.py` (source package of llama-cpp-python 0.3.36) writes PEFT's adapters with one number, `lora_alpha`, and
# llama.cpp multiplies by alpha / rank. What else an adapter's configuration (PEFT 0.21.2) says of its scale is left out, without a
# word: of `use_rslora`, which divides by the root of the rank, an adapter of rank 16 has a quarter of the scale that it was trained
# with (of rank 64 an eighth), and `alpha_pattern` counts for nothing. DoRA's vectors are refused by name.
#
# Guessed before: the scale is multiplied into B, or an error. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 peft==0.21.2
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$folder" \
    llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
mv "$folder"/llama_cpp_python-0.3.36/vendor/llama.cpp "$folder/llama.cpp"

cat > "$folder/train.py" <<'PYTHON'
import sys

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(f"{sys.argv[1]}/model")
for name, options in (
    ("plain", {}),
    ("root", {"use_rslora": True}),
    ("pattern", {"alpha_pattern": {"layers.0.self_attn.v_proj": 64}}),
):
    config = LoraConfig(r=16, lora_alpha=16, target_modules=["v_proj"], init_lora_weights=False, **options)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**shape)), config)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    print(name, "PEFT", *(layer.self_attn.v_proj.scaling["default"] for layer in model.base_model.model.model.layers))
PYTHON
cat > "$folder/read.py" <<'PYTHON'
import sys

sys.path.insert(0, f"{sys.argv[1]}/llama.cpp/gguf-py")
import numpy
from gguf import GGUFReader
from safetensors.numpy import load_file

for name in ("plain", "root", "pattern"):
    reader = GGUFReader(f"{sys.argv[1]}/{name}.gguf")
    alpha = reader.fields["adapter.lora.alpha"].contents()
    b = [tensor for tensor in reader.tensors if tensor.name.endswith("lora_b")]
    saved = load_file(f"{sys.argv[1]}/{name}/adapter_model.safetensors")
    kept = [numpy.array_equal(t.data, saved[key]) for t, key in zip(b, sorted(k for k in saved if "lora_B" in k), strict=True)]
    print(name, "GGUF", *(alpha / tensor.data.shape[1] for tensor in b), "B as it was", kept)
PYTHON
seen=$("$python" -W ignore "$folder/train.py" "$folder" 2>"$folder/log") || { tail -n 5 "$folder/log" >&2; exit 1; }
for name in plain root pattern; do
    "$python" -W ignore "$folder/llama.cpp/convert_lora_to_gguf.py" --base "$folder/model" --outtype f32 \
        --outfile "$folder/$name.gguf" "$folder/$name" >"$folder/log" 2>&1 || { tail -n 5 "$folder/log" >&2; exit 1; }
    seen+=$'\n'"$name, words of a scale: $(grep -ciE "warning|rslora|alpha_pattern" "$folder/log" || true)"
done
seen+=$'\n'$("$python" -W ignore "$folder/read.py" "$folder")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
plain PEFT 1.0 1.0
root PEFT 4.0 4.0
pattern PEFT 4.0 1.0
plain, words of a scale: 0
root, words of a scale: 0
pattern, words of a scale: 0
plain GGUF 1.0 1.0 B as it was [True, True]
root GGUF 1.0 1.0 B as it was [True, True]
pattern GGUF 1.0 1.0 B as it was [True, True]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
