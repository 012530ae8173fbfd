#!/usr/bin/env bash
# tokenizers 0.23.3 reads a `tokenizer.json` whose added tokens leave ids free (a vocabulary of 0 to 2, added tokens 8 and
# 12: an embedding that was padded first, tokens that were taken out) and gives them the next ids in the order of the list,
# 3 and 4, without an error or a warning; so it does where the file gives an added token an id of the vocabulary. The end token
# that `generation_config.json` names by its id is then another token, or none, and each special token of a prompt another row
# of the embedding. transformers 5.24.0 on top of it says 3 and 4 as well, though `tokenizer_config.json` has 8 and 12 in
# `added_tokens_decoder`, and writes 3 and 4 when it saves.
#
# Guessed before: the ids of the file, or an error. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3 transformers==5.24.0 numpy==2.4.6

seen=$("$python" -W ignore - "$folder" 2>/dev/null <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

folder = Path(sys.argv[1], "model")
folder.mkdir()
first = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
first.add_special_tokens(["<x>", "</s>"])
for numbers in ((3, 4), (8, 12), (12, 8), (1, 2)):
    file = json.loads(first.to_str())
    for token, number in zip(file["added_tokens"], numbers, strict=True):
        token["id"] = number
    (folder / "tokenizer.json").write_text(json.dumps(file))
    listed = {str(one["id"]): {"content": one["content"], "special": True} for one in file["added_tokens"]}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "added_tokens_decoder": listed}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other = AutoTokenizer.from_pretrained(folder)
    read = [own.encode(one).ids for one in ("<x>", "</s>")]
    other.save_pretrained(folder / "saved")
    saved = json.loads((folder / "saved" / "tokenizer.json").read_text())["added_tokens"]
    tokens = (*other("<x></s>")["input_ids"], other.eos_token_id)
    print("written", *numbers, "read", *read, own.id_to_token(numbers[1]), end=" ")
    print("transformers", *tokens, "saved", *(one["id"] for one in saved))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
written 3 4 read [3] [4] </s> transformers 3 4 4 saved 3 4
written 8 12 read [3] [4] None transformers 3 4 4 saved 3 4
written 12 8 read [3] [4] None transformers 3 4 4 saved 3 4
written 1 2 read [3] [4] c transformers 3 4 4 saved 3 4
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
