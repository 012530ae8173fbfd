#!/usr/bin/env bash
# kitoken 0.11.1 reads `tokenizer.json` and leaves out what it says of added tokens: `rstrip` and `lstrip`, by which white space beside a token
# belongs to it (so of Phi-3's `<|user|>`, behind which its template writes a line end), and `single_word`. Where one
# added token begins with another (`<a>`, `<a><b>`) the shorter one is taken, and the rest is cut into letters. So the
# same prompt has other ids, and a cache that knows prompts by their ids finds nothing. tokenizers 0.23.3 does what the
# file says. Plain text, normalisers and byte fallback give the same ids.
#
# Guessed before: the same ids. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check kitoken==0.11.1 tokenizers==0.23.3

cat >"$folder/run.py" <<'PYTHON'
import json

from kitoken import Kitoken
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: number for number, letter in enumerate(letters)}
for word in ("Ġa", "to", "tok", "en", "token", "Ġtok"):
    vocabulary[word] = len(vocabulary)
merges = [("Ġ", "a"), ("t", "o"), ("to", "k"), ("e", "n"), ("tok", "en"), ("Ġ", "tok")]


def compare(name, text, *added):
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(added))
    other = Kitoken.from_tokenizers(tokenizer.to_str().encode())
    right = tokenizer.encode(text, add_special_tokens=False).ids
    for package, ids in (("tokenizers", right), ("kitoken", list(other.encode(text, True)))):
        print(f"{name} {json.dumps(text)} {package}: {' '.join(tokenizer.id_to_token(one) for one in ids)}")


compare("rstrip", "<|user|>\n a", AddedToken("<|user|>", rstrip=True))
compare("lstrip", "a <mask>", AddedToken("<mask>", lstrip=True))
compare("single_word", "tok token", AddedToken("tok", single_word=True))
compare("the longer one", "<a><b>", AddedToken("<a>"), AddedToken("<a><b>"))
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
rstrip "<|user|>\n a" tokenizers: <|user|> a
rstrip "<|user|>\n a" kitoken: <|user|> Ċ Ġa
lstrip "a <mask>" tokenizers: a <mask>
lstrip "a <mask>" kitoken: a Ġ <mask>
single_word "tok token" tokenizers: tok Ġ token
single_word "tok token" kitoken: tok Ġ tok en
the longer one "<a><b>" tokenizers: <a><b>
the longer one "<a><b>" kitoken: <a> < b >
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
