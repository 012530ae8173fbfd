#!/usr/bin/env bash
# tokenizers 0.23.3's `Metaspace`, which stands for SentencePiece in the tokenizer.json of Llama, Mistral and Gemma
# models, gives "x" and " x" the same tokens: it puts its mark before a text only where none stands there, and
# the text's own space has become one. SentencePiece 0.2.3 itself puts one more before " x". So a prompt
# that begins with a space loses it, and two spaces become one. The older form of the same files
# (a normaliser that prepends and replaces) keeps it.
#
# Guessed before: both keep it, as SentencePiece does. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3

seen=$("$python" -W ignore - <<'PYTHON'
import io

import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

file = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["x xx x"] * 50), model_writer=file, model_type="bpe", vocab_size=8, minloglevel=2,
    normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
)
own = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def of(before_a_text):
    tokenizer = Tokenizer(models.BPE({"\u2581": 0, "x": 1}, []))
    if before_a_text == "Metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


for text in ("x", " x", "  x"):
    spaces = own.encode(text, out_type=str)
    new, old = (of(one).encode(text).tokens for one in ("Metaspace", "normaliser"))
    print(repr(text), *(ascii("".join(one)).replace("\\u2581", "_") for one in (spaces, new, old)))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
'x' '_x' '_x' '_x'
' x' '__x' '_x' '__x'
'  x' '___x' '__x' '___x'
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
