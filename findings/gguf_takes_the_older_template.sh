#!/usr/bin/env bash
# gguf 0.19.0 (`SpecialVocab`, by which llama.cpp's converter reads a model's folder) takes the chat template of
# `tokenizer_config.json` where there is a `chat_template.jinja`, too; transformers 5.23.0 takes the file. Where a template
# was mended in the file, or by `save_pretrained`, and the old one was left in the configuration, the GGUF file has the old
# one. Named templates in `additional_chat_templates` are not read; those of a list in the configuration are.
#
# Guessed before: the file, as transformers. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check transformers==5.23.0 gguf==0.19.0

seen=$("$python" -W ignore - "$folder" 2>/dev/null <<'PYTHON'
import json
import sys
from pathlib import Path

from gguf.vocab import SpecialVocab
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def show(case):
    found = AutoTokenizer.from_pretrained(folder).chat_template
    print(f"{case}: transformers {found}, gguf {SpecialVocab(folder, n_vocab=2).chat_template}")


folder = Path(sys.argv[1]) / "model"
made = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(folder)
file = folder / "tokenizer_config.json"
file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "the configuration's"}))
show("configuration alone")
(folder / "chat_template.jinja").write_text("the file's")
show("both")
(folder / "additional_chat_templates").mkdir()
(folder / "additional_chat_templates" / "tool_use.jinja").write_text("the tools'")
show("and one for tools")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
configuration alone: transformers the configuration's, gguf the configuration's
both: transformers the file's, gguf the configuration's
and one for tools: transformers {'default': "the file's", 'tool_use': "the tools'"}, gguf the configuration's
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
