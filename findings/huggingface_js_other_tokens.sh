#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0, the tokenizers of Transformers.js, reads `tokenizer.json` and cuts a text into other tokens than tokenizers
# 0.23.3, without a word. With tiktoken's own pattern of cl100k two line ends are two tokens where the model was trained with one, in
# any code with an empty line. A `Split` knows two behaviours: `MergedWithPrevious` and `MergedWithNext` stand apart, as `Isolated`
# does, and beside `invert` it loses the text between the matches, so that "A b" is "b". `single_word` of an added token says
# nothing, and a Unigram model without a piece for "é" gives `<unk>`, though the file asks for its bytes.
#
# Guessed before: the same tokens, or an error for what the library lacks. Found 2026-12-01. (Needs Node.js beside Python.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3 tiktoken==0.14.0
npm install --silent --no-audit --no-fund --prefix "$folder" @huggingface/tokenizers@0.2.0

cat > "$folder/files.py" <<'PYTHON'
import inspect
import json
import re
import sys

import tiktoken
import tiktoken_ext.openai_public
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

source = inspect.getsource(tiktoken_ext.openai_public.cl100k_base)
(cl100k,) = re.findall('"pat_str": r"""(.*)"""', source)
pieces = ["a", "b", "A", "1", "2", " ", "\n", "\n\n", "<", ">", "b1", "1b", "2b", "<b>"]


def words(behavior, pattern, invert=False):
    # Every piece that stands alone is one token, so the tokens are what the text was cut into.
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior, invert)
    return tokenizer


tag = words("isolated", " ")
tag.add_tokens([AddedToken("<b>", single_word=True)])
letters = [("<unk>", 0.0), ("a", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
cases = {
    "cl100k": (words("isolated", cl100k), "a\n\nb"),
    "merged with previous": (words("merged_with_previous", "[0-9]"), "b1 2b"),
    "merged with next": (words("merged_with_next", "[0-9]"), "b1b"),
    "isolated": (words("isolated", "[0-9]"), "b1b"),
    "invert": (words("isolated", "[a-z]+", invert=True), "A b"),
    "single_word": (tag, "a<b>a <b>"),
    "bytes": (Tokenizer(models.Unigram(letters, unk_id=0, byte_fallback=True)), "aé"),
}
rows = {}
for name, (tokenizer, text) in cases.items():
    rows[name] = {"file": json.loads(tokenizer.to_str()), "text": text, "tokens": tokenizer.encode(text).tokens}
ranks = {bytes([byte]): byte for byte in range(256)} | {b"\n\n": 256}
encoding = tiktoken.Encoding("cl100k", pat_str=cl100k, mergeable_ranks=ranks, special_tokens={})
print("cl100k, tiktoken", [encoding.decode([token]) for token in encoding.encode("a\n\nb")])
with open(sys.argv[1], "w") as file:
    json.dump(rows, file)
PYTHON
cat > "$folder/read.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

for (const [name, { file, text, tokens }] of Object.entries(JSON.parse(readFileSync(process.argv[2])))) {
  const read = new Tokenizer(file, {}).encode(text);
  const seen = read.ids.map((id) => Object.entries(file.model.vocab).find(([, i]) => i === id)?.[0] ?? id);
  const ours = file.model.type === "Unigram" ? read.ids.map((id) => file.model.vocab[id][0]) : seen;
  console.log(name, JSON.stringify(text), "tokenizers", JSON.stringify(tokens), "JavaScript", JSON.stringify(ours));
}
JAVASCRIPT
seen=$("$python" "$folder/files.py" "$folder/rows.json" 2>"$folder/log" &&
    node "$folder/read.mjs" "$folder/rows.json" 2>"$folder/log") || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
cl100k, tiktoken ['a', '\n\n', 'b']
cl100k "a\n\nb" tokenizers ["a","\n\n","b"] JavaScript ["a","\n","\n","b"]
merged with previous "b1 2b" tokenizers ["b1"," ","2","b"] JavaScript ["b","1"," ","2","b"]
merged with next "b1b" tokenizers ["b","1b"] JavaScript ["b","1","b"]
isolated "b1b" tokenizers ["b","1","b"] JavaScript ["b","1","b"]
invert "A b" tokenizers ["A"," ","b"] JavaScript ["b"]
single_word "a<b>a <b>" tokenizers ["a","<","b",">","a"," ","<b>"] JavaScript ["a","<b>","a"," ","<b>"]
bytes "aé" tokenizers ["a","<0xC3>","<0xA9>"] JavaScript ["a","<unk>"]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
