#!/usr/bin/env bash
# onnxruntime-genai 0.18.0 (`Tokenizer.apply_chat_template`) renders templates otherwise than transformers 5.24.0, without a word. The thoughts of
# earlier turns, which the templates of Qwen3, Qwen3.5 and DeepSeek R1 take out of a conversation, stay in it. Of a tool Llama 3.3's template
# gets the function alone, without {"type": "function", "function": ...} around it. Line breaks and indents around a template's
# statements stay: a prompt of SmolLM3, Seed-OSS or MiniMax M2 begins with blank lines. A number has six digits behind the point: in
# Qwen3.5's calls 1e-7 is 0.000000. The templates are those of llama.cpp's collection (source package of llama-cpp-python 0.3.36).
#
# Guessed before: the same text, or an error for what the engine lacks. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check onnxruntime-genai==0.18.0 tokenizers==0.23.3 transformers==5.24.0 \
    jinja2==3.1.6 numpy==2.4.6
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$folder" \
    llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder" --wildcards '*/models/templates/*.jinja'

seen=$(cd "$folder" && "$python" -W ignore - 2>"$folder/log" <<'PYTHON'
import json
from os.path import commonprefix
from pathlib import Path

import onnxruntime_genai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

own = Tokenizer(models.BPE({one: at for at, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
own.add_special_tokens(["<s>", "</s>"])
model_folder = Path("model")
model_folder.mkdir()
own.save(str(model_folder / "tokenizer.json"))
names = {"bos_token": "<s>", "eos_token": "</s>"}
(model_folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", **names}))
sizes = {"head_size": 8, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "num_key_value_heads": 1}
decoder = {"filename": "model.onnx", "inputs": {}, "outputs": {}, **sizes}
ends = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
model = {"type": "llama", "vocab_size": own.get_vocab_size(), "context_length": 64, "decoder": decoder, **ends}
(model_folder / "genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 64}}))
tokenizer = onnxruntime_genai.Tokenizer(onnxruntime_genai.Config(str(model_folder)))

tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"v": 1e-7}}}
question = [{"role": "user", "content": "?"}]
thought = [*question, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, *question]
called = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "7"}]


def differences(one, two):
    """What stands in each of two texts between what they have in common."""
    head = len(commonprefix([one, two]))
    tail = len(commonprefix([one[:head - 1 : -1] if head else one[::-1], two[:head - 1 : -1] if head else two[::-1]]))
    return [text[head : len(text) - tail] for text in (one, two)]


for name, messages, listed in (
    ("Qwen-Qwen3-0.6B", question, None),
    ("Qwen-Qwen3-0.6B", thought, None),
    ("Qwen3.5-4B", thought, None),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", thought, None),
    ("Qwen3.5-4B", called, tools),
    ("meta-llama-Llama-3.3-70B-Instruct", question, tools),
    ("HuggingFaceTB-SmolLM3-3B", question, None),
    ("ByteDance-Seed-OSS", question, None),
    ("MiniMax-M2", question, None),
):
    (path,) = Path().glob(f"*/vendor/llama.cpp/models/templates/{name}.jinja")
    template = path.read_text()
    ((one,), _) = render_jinja_template([messages], listed, chat_template=template, add_generation_prompt=True, **names)
    more = {"tools": json.dumps(listed)} if listed else {}
    two = tokenizer.apply_chat_template(json.dumps(messages), template_str=template, add_generation_prompt=True, **more)
    print(f"{name}:", "alike" if one == two else " becomes ".join(map(repr, differences(one, two))))
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Qwen-Qwen3-0.6B: alike
Qwen-Qwen3-0.6B: '' becomes '<think>\nhm\n</think>\n\n'
Qwen3.5-4B: '' becomes '<think>\nhm\n</think>\n\n'
deepseek-ai-DeepSeek-R1-Distill-Qwen-32B: '' becomes '<think>\nhm\n</think>'
Qwen3.5-4B: '1e-07' becomes '0.000000'
meta-llama-Llama-3.3-70B-Instruct: 'type": "function",\n    "function": {\n        "name": "f",\n        "description": "d",\n        "parameters": {\n            "type": "object",\n            "properties": {}\n        }' becomes 'name": "f",\n    "description": "d",\n    "parameters": {\n        '
HuggingFaceTB-SmolLM3-3B: '' becomes '\n'
ByteDance-Seed-OSS: '<seed:bos>user\n?<seed:eos>' becomes '\n\n\n\n\n\n<seed:bos>user\n?<seed:eos>\n\n'
MiniMax-M2: '' becomes '\n\n        '
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
