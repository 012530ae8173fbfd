#!/usr/bin/env bash
# transformers 5.24.0 takes vocabulary and merges of `tokenizer.json`, and leaves out the file's normaliser and
# pre-tokenizer, where `tokenizer_config.json` names the class of Qwen2, GPT-2, GPT-NeoX or Cohere: the class brings its own, without a word. A
# tokenizer that was trained to cut digits in threes, in a folder that says `Qwen2Tokenizer`, cuts them one by one, and composes
# "e" and U+0301, which the file leaves apart. In a folder of a qwen2 model it is so whatever the class is called,
# `TokenizersBackend` included, which transformers itself writes; of a qwen3 or gpt2 model that name reads the whole file. For
# Llama's class it sees that the file is of another kind. tokenizers alone reads what the file says.
#
# Guessed before: the file counts, whatever the class. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3 transformers==5.24.0 numpy==2.4.6

seen=$("$python" -W ignore - "$folder" 2>"$folder/log" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

vocabulary = {one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
merges = [("1", "2"), ("12", "3"), ("123", "4")]
for one, other in merges:
    vocabulary[one + other] = len(vocabulary)
own = Tokenizer(models.BPE(vocabulary, merges))
digits = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
own.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
own.decoder = decoders.ByteLevel()
text = "12345 e\u0301"
for kind, model in (
    ("Qwen2Tokenizer", "qwen2"),
    ("Qwen2Tokenizer", "llama"),
    ("LlamaTokenizerFast", "qwen2"),
    ("GPT2Tokenizer", "gpt2"),
    ("GPTNeoXTokenizerFast", "gpt_neox"),
    ("CohereTokenizerFast", "cohere2"),
    ("LlamaTokenizerFast", "llama"),
    ("PreTrainedTokenizerFast", "qwen2"),
    ("TokenizersBackend", "qwen2"),
    ("TokenizersBackend", "qwen3"),
    ("TokenizersBackend", "gpt2"),
):
    folder = Path(sys.argv[1], f"{kind}-{model}")
    folder.mkdir()
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    other = AutoTokenizer.from_pretrained(folder)
    ids = other(text, add_special_tokens=False)["input_ids"]
    same = ids == own.encode(text).ids
    print(kind, model, type(other).__name__, same, *map(ascii, other.convert_ids_to_tokens(ids)))
PYTHON
)
printf '%s\n' "$seen"
if grep -i normali "$folder/log" || grep -i pre_tokenizer "$folder/log"; then said=yes; else said=no; fi
echo "a word about normaliser or pre-tokenizer: $said"
expected=$(cat <<'TEXT'
Qwen2Tokenizer qwen2 Qwen2Tokenizer False '1' '2' '3' '4' '5' '\u0120' '\xc3' '\xa9'
Qwen2Tokenizer llama Qwen2Tokenizer False '1' '2' '3' '4' '5' '\u0120' '\xc3' '\xa9'
LlamaTokenizerFast qwen2 Qwen2Tokenizer False '1' '2' '3' '4' '5' '\u0120' '\xc3' '\xa9'
GPT2Tokenizer gpt2 GPT2Tokenizer False '1234' '5' '\u0120' 'e' '\xcc' '\u0123'
GPTNeoXTokenizerFast gpt_neox GPTNeoXTokenizer False '1234' '5' '\u0120' '\xc3' '\xa9'
CohereTokenizerFast cohere2 CohereTokenizer False '1' '2' '3' '4' '5' '\u0120' '\xc3' '\xa9'
LlamaTokenizerFast llama TokenizersBackend True '123' '4' '5' '\u0120' 'e' '\xcc' '\u0123'
PreTrainedTokenizerFast qwen2 Qwen2Tokenizer False '1' '2' '3' '4' '5' '\u0120' '\xc3' '\xa9'
TokenizersBackend qwen2 Qwen2Tokenizer False '1' '2' '3' '4' '5' '\u0120' '\xc3' '\xa9'
TokenizersBackend qwen3 TokenizersBackend True '123' '4' '5' '\u0120' 'e' '\xcc' '\u0123'
TokenizersBackend gpt2 TokenizersBackend True '123' '4' '5' '\u0120' 'e' '\xcc' '\u0123'
TEXT
)
[ "$seen" = "$expected" ] && [ "$said" = no ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
