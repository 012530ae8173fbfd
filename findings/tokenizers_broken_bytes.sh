#!/usr/bin/env bash
# tokenizers 0.23.3 decodes bytes that are tokens of their own (`ByteFallback`, as in Llama 2's and Mistral's
# first tokenizers) by whole runs: where one byte of a run is not UTF-8, all of it becomes U+FFFD, also the
# characters before that byte which are whole. `C3 A9` is "é"; `C3 A9 C3` is three U+FFFD, and the "é"
# is gone. A stream (`DecodeStream`) has given the "é" away by then, so streamed and whole answers differ.
# Python's `bytes.decode(errors="replace")` keeps it: "é" and one U+FFFD.
#
# Guessed before: "é" and one U+FFFD. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3

seen=$("$python" -W ignore - <<'PYTHON'
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

for text in (b"\xc3\xa9", b"\xc3\xa9\xc3", b"\xc3\xa9\xe4\xb8", b"\xf0\x9f\x98\x80\xc3"):
    whole = tokenizer.decode([*text, 256])
    stream = DecodeStream(skip_special_tokens=False)
    streamed = "".join(stream.step(tokenizer, byte) or "" for byte in text)
    print(text.hex(" "), ascii(whole), ascii(streamed), ascii(text.decode(errors="replace") + "x"))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
c3 a9 '\xe9x' '\xe9' '\xe9x'
c3 a9 c3 '\ufffd\ufffd\ufffdx' '\xe9' '\xe9\ufffdx'
c3 a9 e4 b8 '\ufffd\ufffd\ufffd\ufffdx' '\xe9' '\xe9\ufffdx'
f0 9f 98 80 c3 '\ufffd\ufffd\ufffd\ufffd\ufffdx' '\U0001f600' '\U0001f600\ufffdx'
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
