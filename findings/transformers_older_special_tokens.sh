#!/usr/bin/env bash
# transformers 5.24.0 gives a tokenizer its old special tokens back. It writes `tokenizer_config.json` without
# `added_tokens_decoder`, and leaves `special_tokens_map.json` where it is, which transformers 4 wrote; in a folder
# that has no such key it reads that map, which overrides the configuration. Where one sets the `eos_token` of a
# tokenizer that transformers 4 saved, and saves it in its folder, it is the old one when it is read again.
#
# Guessed before: those that were saved. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
done

"$folder/4.57.6/bin/python" -W ignore - "$folder/model" 2>/dev/null <<'PYTHON'
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

made = Tokenizer(models.BPE({"a": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "<end>": 4}, []))
made.add_special_tokens(["<s>", "</s>", "<pad>", "<end>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
tokenizer.save_pretrained(sys.argv[1])
PYTHON

seen=$("$folder/5.24.0/bin/python" -W ignore - "$folder" 2>/dev/null <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder / "model")
print("as transformers 4 saved it:", tokenizer.eos_token, tokenizer.pad_token)
tokenizer.eos_token, tokenizer.pad_token = "<end>", "<pad>"
for name in ("model", "another"):
    tokenizer.save_pretrained(folder / name)
    config = json.loads((folder / name / "tokenizer_config.json").read_text())
    again = AutoTokenizer.from_pretrained(folder / name)
    print(f"saved in {name}: {config['eos_token']} {config['pad_token']}", end=", ")
    print(f"read again: {again.eos_token} {again.pad_token}, ends with {again.eos_token_id}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
as transformers 4 saved it: </s> None
saved in model: <end> <pad>, read again: </s> <pad>, ends with 2
saved in another: <end> <pad>, read again: <end> <pad>, ends with 4
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
