#!/usr/bin/env bash
# outlines-core 0.2.14 writes the schema `{}`, any JSON, as alternatives without parentheses around them. As a property or an
# item of `prefixItems` it cuts the pattern of the whole object: of {"type": "object", "properties": {"a": {}}, "required": ["a"]} the
# text `{"a":true` is a match, without its end, and so is `5` alone; `{"a": 1}` is none, nor any other object. Zod's
# `z.any()` and `z.unknown()` are `{}`. At the root of a schema and in `anyOf` it is right. The Index that masks tokens is made
# of the same pattern and ends where it ends.
#
# Guessed before: any JSON value. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check outlines-core==0.2.14

seen=$("$python" -W ignore - <<'PYTHON'
import json
import re

from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

TEXTS = ('{"a": 1}', '{"a":true', '{"a": true}', '{"a": true, "b": 2}', '{}, "b": 2}', "null", "5", "[1]", "[1, 2]", "[1, true")
number = {"type": "integer"}


def ends(pattern, text):
    vocabulary = Vocabulary(128, {chr(byte): [byte] for byte in range(1, 127)})
    guide = Guide(Index(pattern, vocabulary))
    for byte in text.encode():
        if byte not in guide.get_tokens():
            return False
        guide.advance(byte)
    return 128 in guide.get_tokens()


for schema in (
    {},
    {"anyOf": [{}, number]},
    {"type": "object", "properties": {"a": number}, "required": ["a"]},
    {"type": "object", "properties": {"a": {}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {}, "b": number}, "required": ["a", "b"]},
    {"type": "array", "prefixItems": [number, {}]},
):
    pattern = build_regex_from_schema(json.dumps(schema))
    matches = [text for text in TEXTS if re.fullmatch(pattern, text)]
    if schema and "anyOf" not in schema:
        assert matches == [text for text in TEXTS if ends(pattern, text)]
    print(json.dumps(schema))
    print("  ", *matches, sep="   ")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{}
     {"a": 1}   {"a": true}   {"a": true, "b": 2}   null   5   [1]   [1, 2]
{"anyOf": [{}, {"type": "integer"}]}
     {"a": 1}   {"a": true}   {"a": true, "b": 2}   null   5   [1]   [1, 2]
{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
     {"a": 1}
{"type": "object", "properties": {"a": {}}, "required": ["a"]}
     {"a":true   null   5   [1]   [1, 2]
{"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}, "required": ["a", "b"]}
     {"a":true   {}, "b": 2}   null   5   [1]   [1, 2]
{"type": "array", "prefixItems": [{"type": "integer"}, {}]}
     null   5   [1]   [1, 2]   [1, true
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
