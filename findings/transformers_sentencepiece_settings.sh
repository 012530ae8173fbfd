#!/usr/bin/env bash
# transformers 5.24.0 reads SentencePiece's `tokenizer.model` for the class `LlamaTokenizer` and takes its pieces alone. What
# the same file says of the text before it is cut counts for nothing: without `add_dummy_prefix` each prompt begins with a mark
# that the model was trained without; the normalisation that SentencePiece's trainer has by default (`nmt_nfkc`: full-width
# letters, ligatures, composed accents) is left out, and spaces that `remove_extra_whitespaces` takes away stay. And where there
# is no byte fallback, a character without a piece is left out of the prompt, without `<unk>`. (The fast tokenizer of transformers
# 4.57.6 leaves out the settings, too, and gives `<unk>`.) SentencePiece 0.2.3 itself does what the file says.
#
# Guessed before: the settings are read, as the same library's converter for other classes does. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  tokenizers==0.23.3 transformers==5.24.0 sentencepiece==0.2.3 protobuf==7.36.2 numpy==2.4.6

seen=$("$python" -W ignore - "$folder" 2>"$folder/log" <<'PYTHON'
import json
import sys
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

TEXTS = ("hello", "hello  you ", "\uff28\uff29", "\ufb01ne", "cafe\u0301", "\u4e2d")
plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
for name, settings in (
    ("plain", plain),
    ("no dummy prefix", plain | {"add_dummy_prefix": False}),
    ("normalised", plain | {"normalization_rule_name": "nmt_nfkc"}),
    ("no extra spaces", plain | {"remove_extra_whitespaces": True}),
):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    lines = iter(["hello you fine HI caf\u00e9"] * 50)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=24,
        hard_vocab_limit=False, character_coverage=1.0, minloglevel=2, **settings,
    )
    words = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    other = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        one, two = own.encode(text), other(text, add_special_tokens=False)["input_ids"]
        if one != two:
            pieces = [" ".join(map(own.id_to_piece, ids)) for ids in (one, two)]
            print(f"{name}: {ascii(text)} sentencepiece {ascii(pieces[0])} transformers {ascii(pieces[1])}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
plain: '\uff28\uff29' sentencepiece '\u2581 <unk>' transformers '\u2581'
plain: '\ufb01ne' sentencepiece '\u2581 <unk> ne' transformers '\u2581 ne'
plain: 'cafe\u0301' sentencepiece '\u2581 c af e <unk>' transformers '\u2581 c af e'
plain: '\u4e2d' sentencepiece '\u2581 <unk>' transformers '\u2581'
no dummy prefix: 'hello' sentencepiece 'h el lo' transformers '\u2581 h el lo'
no dummy prefix: 'hello  you ' sentencepiece 'h el lo \u2581 \u2581 y o u \u2581' transformers '\u2581 h el lo \u2581 \u2581 y o u \u2581'
no dummy prefix: '\uff28\uff29' sentencepiece '<unk>' transformers '\u2581'
no dummy prefix: '\ufb01ne' sentencepiece '<unk> ne' transformers '\u2581 ne'
no dummy prefix: 'cafe\u0301' sentencepiece 'c af e <unk>' transformers '\u2581 c af e'
no dummy prefix: '\u4e2d' sentencepiece '<unk>' transformers '\u2581'
normalised: '\uff28\uff29' sentencepiece '\u2581 HI' transformers '\u2581'
normalised: '\ufb01ne' sentencepiece '\u2581 fi ne' transformers '\u2581 ne'
normalised: 'cafe\u0301' sentencepiece '\u2581 c af \xe9' transformers '\u2581 c af e'
normalised: '\u4e2d' sentencepiece '\u2581 <unk>' transformers '\u2581'
no extra spaces: 'hello  you ' sentencepiece '\u2581 h el lo \u2581 y o u' transformers '\u2581 h el lo \u2581 \u2581 y o u \u2581'
no extra spaces: '\uff28\uff29' sentencepiece '\u2581 <unk>' transformers '\u2581'
no extra spaces: '\ufb01ne' sentencepiece '\u2581 <unk> ne' transformers '\u2581 ne'
no extra spaces: 'cafe\u0301' sentencepiece '\u2581 c af e <unk>' transformers '\u2581 c af e'
no extra spaces: '\u4e2d' sentencepiece '\u2581 <unk>' transformers '\u2581'
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
