#!/usr/bin/env bash
# openvino-genai 2026.4.1.0 (`Tokenizer.apply_chat_template`, the engine minja) writes calls of tools otherwise than a model's template does,
# without a word. In the templates of DeepSeek V3.2, DeepSeek V4, Laguna and Ministral 3 it does not see that they write calls: of an earlier call
# comes {"tool_calls": [...]} as the assistant's words, of its result {"tool_response": ...} as the user's, though the same
# templates tell the model to call in their own form. Numbers have six digits behind the point: in Qwen3-Coder's calls 1e-7 is
# 0.000000, 0.5 is 0.500000. null in a call of Gemma 4 is nothing: {v:}. transformers 5.24.0 (Jinja2) renders the same
# templates, those of llama.cpp's collection (in the source package of llama-cpp-python 0.3.36).
#
# Guessed before: the same text, or an error for what the engine lacks. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check openvino==2026.4.1 openvino-genai==2026.4.1.0 \
    openvino-tokenizers==2026.4.1.0 tokenizers==0.23.3 transformers==5.24.0 jinja2==3.1.6 numpy==2.4.6
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$folder" \
    llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder" --wildcards '*/models/templates/*.jinja'

seen=$(cd "$folder" && "$python" -W ignore - 2>"$folder/log" <<'PYTHON'
from os.path import commonprefix
from pathlib import Path

import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

own = Tokenizer(models.BPE({one: at for at, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
own.add_special_tokens(["<s>", "</s>"])
names = {"bos_token": "<s>", "eos_token": "</s>"}
to_ids, to_text = convert_tokenizer(PreTrainedTokenizerFast(tokenizer_object=own, **names), with_detokenizer=True)
openvino.save_model(to_ids, "tokenizer/openvino_tokenizer.xml")
openvino.save_model(to_text, "tokenizer/openvino_detokenizer.xml")
tokenizer = openvino_genai.Tokenizer("tokenizer")
parameters = {"type": "object", "properties": {"v": {"type": "number"}}}
tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}]


def differences(one, two):
    """What stands in each of two texts between what they have in common, in one line."""
    head = len(commonprefix([one, two]))
    tail = len(commonprefix([one[:head - 1 : -1], two[:head - 1 : -1]]))
    return [" ".join(text[head : len(text) - tail].split()) for text in (one, two)]


for name, value in (
    ("Qwen3-Coder", 5),
    ("Qwen3-Coder", 0.5),
    ("Qwen3-Coder", 1e-7),
    ("google-gemma-4-31B-it", 5),
    ("google-gemma-4-31B-it", None),
    ("deepseek-ai-DeepSeek-V3.2", 5),
    ("deepseek-ai-DeepSeek-V4", 5),
    ("poolside-Laguna-S-2.1", 5),
    ("mistralai-Ministral-3-14B-Reasoning-2512", 5),
):
    (path,) = Path().glob(f"*/vendor/llama.cpp/models/templates/{name}.jinja")
    template = path.read_text()
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"v": value}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "7"},
    ]
    ((one,), _) = render_jinja_template([messages], tools, chat_template=template, add_generation_prompt=True, **names)
    two = tokenizer.apply_chat_template(messages, True, template, tools)
    print(f"{name}, {value}:", "alike" if one == two else " becomes ".join(map(repr, differences(one, two))))
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Qwen3-Coder, 5: alike
Qwen3-Coder, 0.5: '' becomes '00000'
Qwen3-Coder, 1e-07: '1e-07' becomes '0.000000'
google-gemma-4-31B-it, 5: alike
google-gemma-4-31B-it, None: 'None' becomes ''
deepseek-ai-DeepSeek-V3.2, 5: '<｜DSML｜function_calls> <｜DSML｜invoke name="f"> <｜DSML｜parameter name="v" string="false">5</｜DSML｜parameter> </｜DSML｜invoke> </｜DSML｜function_calls><｜end▁of▁sentence｜> <function_results> <result>7</result> </function_results>' becomes '{ "tool_calls": [ { "name": "f", "arguments": { "v": 5 }, "id": "call00001" } ], "content": "" }<｜end▁of▁sentence｜><｜User｜>{ "tool_response": { "tool": "f", "content": "7", "tool_call_id": "call00001" } }<｜Assistant｜>'
deepseek-ai-DeepSeek-V4, 5: '<｜DSML｜tool_calls> <｜DSML｜invoke name="f"> <｜DSML｜parameter name="v" string="false">5</｜DSML｜parameter> </｜DSML｜invoke> </｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>7</tool_result>' becomes '{ "tool_calls": [ { "name": "f", "arguments": { "v": 5 }, "id": "call00001" } ], "content": "" }<｜end▁of▁sentence｜><｜User｜>{ "tool_response": { "tool": "f", "content": "7", "tool_call_id": "call00001" } }'
poolside-Laguna-S-2.1, 5: '<tool_call>f<arg_key>v</arg_key><arg_value>5</arg_value></tool_call></assistant> <tool_response>7</tool_response' becomes '{ "tool_calls": [ { "name": "f", "arguments": { "v": 5 }, "id": "call00001" } ], "content": "" }</assistant> <user>{ "tool_response": { "tool": "f", "content": "7", "tool_call_id": "call00001" } }</user'
mistralai-Ministral-3-14B-Reasoning-2512, 5: '[TOOL_CALLS]f[ARGS]{"v": 5}</s>[TOOL_RESULTS]7[/TOOL_RESULTS' becomes '{ "tool_calls": [ { "name": "f", "arguments": { "v": 5 }, "id": "call00001" } ], "content": "" }</s>[INST]{ "tool_response": { "tool": "f", "content": "7", "tool_call_id": "call00001" } }[/INST'
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
