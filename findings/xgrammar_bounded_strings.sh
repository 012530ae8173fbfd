#!/usr/bin/env bash
# xgrammar 0.2.9 lets a string with `minLength` or `maxLength` hold no escape at all: no line break, no quote, no
# backslash, no tab, since JSON has them as escapes. Without a bound the same texts are taken. So
# {"type": "string", "maxLength": 2000} is one paragraph in which nobody is quoted.
#
# Guessed before: `\n` counts as one character. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4
"$python" -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.9

seen=$("$python" -W ignore - <<'PYTHON'
import json

import xgrammar

bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
kind = xgrammar.VocabType.BYTE_FALLBACK
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(bytes_and_end, vocab_type=kind, stop_token_ids=[256]))


def accepts(schema, text):
    json.loads(text)
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


for schema in ({"type": "string"}, {"type": "string", "minLength": 1}, {"type": "string", "maxLength": 2000}):
    for value in ("ab", "é", "a\nb", 'a"b', "a\\b"):
        text = json.dumps(value, ensure_ascii=False)
        print(json.dumps(schema), text, accepts(schema, text))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"type": "string"} "ab" True
{"type": "string"} "é" True
{"type": "string"} "a\nb" True
{"type": "string"} "a\"b" True
{"type": "string"} "a\\b" True
{"type": "string", "minLength": 1} "ab" True
{"type": "string", "minLength": 1} "é" True
{"type": "string", "minLength": 1} "a\nb" False
{"type": "string", "minLength": 1} "a\"b" False
{"type": "string", "minLength": 1} "a\\b" False
{"type": "string", "maxLength": 2000} "ab" True
{"type": "string", "maxLength": 2000} "é" True
{"type": "string", "maxLength": 2000} "a\nb" False
{"type": "string", "maxLength": 2000} "a\"b" False
{"type": "string", "maxLength": 2000} "a\\b" False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
