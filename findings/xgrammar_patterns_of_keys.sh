#!/usr/bin/env bash
# xgrammar 0.2.9 takes a pattern of `patternProperties` as the whole key, where JSON Schema looks for it anywhere in
# the key: under {"^x": {"type": "integer"}} the key "x" may be written, "x1" may not, and nothing is said.
# `^x.*$` does what `^x` means. jsonschema 4.26.0 takes every one of these texts.
#
# Guessed before: "x1" is taken. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4 jsonschema==4.26.0
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


import jsonschema

for pattern, text in (
    ("^x", '{"x": 1}'),
    ("^x", '{"x1": 1}'),
    ("x", '{"ax1": 1}'),
    ("^x.*$", '{"x1": 1}'),
    ("^[a-z]{2}", '{"ab": 1}'),
    ("^[a-z]{2}", '{"abc": 1}'),
):
    schema = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    print(pattern, text, accepts(schema, text), valid)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
^x {"x": 1} True True
^x {"x1": 1} False True
x {"ax1": 1} False True
^x.*$ {"x1": 1} True True
^[a-z]{2} {"ab": 1} True True
^[a-z]{2} {"abc": 1} False True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
