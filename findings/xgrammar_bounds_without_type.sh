#!/usr/bin/env bash
# xgrammar 0.2.9 holds a bound of a JSON schema only where `type` stands beside it: {"maximum": 3} lets 4 through,
# {"maxLength": 2} "foo", {"maxItems": 2} [1, 2, 3]. A `type` beside `anyOf` is dropped: {"type": "string", "anyOf":
# [{"maxLength": 2}, {"minLength": 4}]} lets 3 through. `properties` without a type is taken to be an object: [1] is refused. No
# error and no warning says so.
#
# Guessed before: a bound holds the values that it is about, as JSON Schema says. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check xgrammar==0.2.9 torch==2.13.0 jsonschema==4.26.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json

import jsonschema
import xgrammar

bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
kind = xgrammar.VocabType.BYTE_FALLBACK
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(bytes_and_end, vocab_type=kind, stop_token_ids=[256]))
bounds = [{"maxLength": 2}, {"minLength": 4}]
for schema, text in (
    ({"type": "integer", "maximum": 3}, "4"),
    ({"maximum": 3}, "4"),
    ({"type": "string", "maxLength": 2}, '"foo"'),
    ({"maxLength": 2}, '"foo"'),
    ({"type": "array", "maxItems": 2}, "[1, 2, 3]"),
    ({"maxItems": 2}, "[1, 2, 3]"),
    ({"type": "string", "anyOf": bounds}, "3"),
    ({"properties": {"a": {"type": "integer"}}}, "[1]"),
):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    accepted = all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)
    print(json.dumps(schema), text, accepted, jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"type": "integer", "maximum": 3} 4 False False
{"maximum": 3} 4 True False
{"type": "string", "maxLength": 2} "foo" False False
{"maxLength": 2} "foo" True False
{"type": "array", "maxItems": 2} [1, 2, 3] False False
{"maxItems": 2} [1, 2, 3] True False
{"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]} 3 True False
{"properties": {"a": {"type": "integer"}}} [1] False True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
