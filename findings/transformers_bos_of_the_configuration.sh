#!/usr/bin/env bash
# transformers 5.23.0 passes over `add_bos_token` and `add_eos_token` of `tokenizer_config.json` where there is a
# `tokenizer.json`: what its post-processor has is done. In 4.57.1 a `LlamaTokenizerFast` did what the configuration says,
# whatever the file has. So a folder whose file says nothing and whose configuration says `true`, as DeepSeek's, begins a
# text with BOS in 4.57.1 and not in 5.23.0, and llama.cpp's converter takes the configuration. As a keyword of
# `from_pretrained` it works in both; `add_eos_token=True` alone takes the BOS away in 5.23.0.
#
# Guessed before: both do what the configuration says. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/encode.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

folder = Path(sys.argv[1]) / "model"
folder.mkdir(exist_ok=True)
named = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def encode(begins, keywords={}, **settings):
    made = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, [], unk_token="<unk>"))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    else:
        made.post_processor = processors.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    loaded = AutoTokenizer.from_pretrained(folder, **keywords)
    return [one for one in loaded.convert_ids_to_tokens(loaded("a")["input_ids"]) if one in ("<s>", "</s>")]


print(transformers.__version__)
for begins in (False, True):
    print(f"the file has {'a' if begins else 'no'} BOS")
    for settings in ({}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}):
        print(f"  configuration {settings}: {encode(begins, **settings)}")
print("keyword", encode(True, {"add_bos_token": False}), encode(True, {"add_eos_token": True}))
PYTHON
for version in 4.57.1 5.23.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
done
seen=$(for version in 4.57.1 5.23.0; do "$folder/$version/bin/python" -W ignore "$folder/encode.py" "$folder" 2>/dev/null; done)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
4.57.1
the file has no BOS
  configuration {}: ['<s>']
  configuration {'add_bos_token': True}: ['<s>']
  configuration {'add_bos_token': False}: []
  configuration {'add_bos_token': True, 'add_eos_token': True}: ['<s>', '</s>']
the file has a BOS
  configuration {}: ['<s>']
  configuration {'add_bos_token': True}: ['<s>']
  configuration {'add_bos_token': False}: []
  configuration {'add_bos_token': True, 'add_eos_token': True}: ['<s>', '</s>']
keyword [] ['<s>', '</s>']
5.23.0
the file has no BOS
  configuration {}: []
  configuration {'add_bos_token': True}: []
  configuration {'add_bos_token': False}: []
  configuration {'add_bos_token': True, 'add_eos_token': True}: []
the file has a BOS
  configuration {}: ['<s>']
  configuration {'add_bos_token': True}: ['<s>']
  configuration {'add_bos_token': False}: ['<s>']
  configuration {'add_bos_token': True, 'add_eos_token': True}: ['<s>']
keyword [] ['</s>']
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
