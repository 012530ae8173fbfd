#!/usr/bin/env bash
# xgrammar 0.2.9 holds `required` for what stands in `properties`. Where it names another key, any one of those that stand
# there is required in its place: {"properties": {"a": ...}, "required": ["b"]} lets {"a": 1} through, and neither {"b": 1}
# nor {}. Without `properties` nothing is required: zod 4 writes `z.record(z.enum(["a", "b"]), z.number())` with the keys
# in `propertyNames` and `required`, and {} comes. So it does under {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]} beside
# `properties`, which is how one says that either has to be there. Nothing is said of it.
#
# Guessed before: such a key is passed over, or required. Found 2026-11-30.
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
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), strict_mode=False))
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


import jsonschema

number = {"type": "integer"}
one, two = {"a": number}, {"a": number, "z": number}
either = {"anyOf": [{"required": ["a"]}, {"required": ["z"]}]}
record = {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "number"}}
for name, given, *texts in (
    ("one property, b", {"properties": one, "required": ["b"]}, "{}", '{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'),
    ("two properties, b", {"properties": two, "required": ["b"]}, "{}", '{"a": 1}', '{"z": 1}', '{"b": 1}'),
    ("one property, a and b", {"properties": one, "required": ["a", "b"]}, "{}", '{"a": 1}', '{"a": 1, "b": 1}'),
    ("two properties, either", {"properties": two, **either}, "{}", '{"a": 1}', '{"z": 1}'),
    ("zod's record", {**record, "required": ["a", "b"]}, "{}", '{"a": 1}', '{"a": 1, "b": 1}', '{"c": 1}'),
):
    schema = {"type": "object", **given}
    for text in texts:
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        print(name, text, accepts(schema, text), valid)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
one property, b {} False False
one property, b {"a": 1} True False
one property, b {"b": 1} False True
one property, b {"a": 1, "b": 1} True True
two properties, b {} False False
two properties, b {"a": 1} True False
two properties, b {"z": 1} True False
two properties, b {"b": 1} False True
one property, a and b {} False False
one property, a and b {"a": 1} True False
one property, a and b {"a": 1, "b": 1} True True
two properties, either {} True False
two properties, either {"a": 1} True True
two properties, either {"z": 1} True True
zod's record {} True False
zod's record {"a": 1} True False
zod's record {"a": 1, "b": 1} True True
zod's record {"c": 1} False False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
