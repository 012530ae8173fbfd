#!/usr/bin/env bash
# xgrammar 0.2.9 holds `multipleOf` of an integer alone and between two bounds that are near each other; beside one bound, beside two that are
# far apart, beyond 1,024 and of a `number` it drops it, with a line on stderr: {"multipleOf": 5, "minimum": 0} takes 13, and so a
# price in steps, or a count of bytes in pages of 4,096, is any integer. Beside `enum` it drops all else and says nothing: under
# {"enum": [5, 20], "maximum": 10} it takes 20, under {"enum": ["a", "b"], "pattern": "^a"} "b". jsonschema 4.26.0 says
# what is valid.
#
# Guessed before: held for integers, with and without bounds, and an `enum` of what is left. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4 jsonschema==4.26.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.9

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json

import jsonschema
import xgrammar

bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
kind = xgrammar.VocabType.BYTE_FALLBACK
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(bytes_and_end, vocab_type=kind, stop_token_ids=[256]))


def accepts(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


for schema, *texts in (
    ({"type": "integer", "multipleOf": 5}, "10", "13"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20}, "10", "13"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, "10", "13"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100000}, "10", "13"),
    ({"type": "integer", "multipleOf": 4096}, "8192", "13"),
    ({"type": "number", "multipleOf": 5}, "10", "13"),
    ({"enum": [5, 20], "maximum": 10}, "5", "20"),
    ({"type": "string", "enum": ["a", "b"], "pattern": "^a"}, '"a"', '"b"'),
):
    check = jsonschema.Draft202012Validator(schema)
    told = [
        f"{text} is {'valid' if check.is_valid(json.loads(text)) else 'not valid'} and {'taken' if accepts(schema, text) else 'refused'}"
        for text in texts
    ]
    print(json.dumps(schema), ", ".join(told))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"type": "integer", "multipleOf": 5} 10 is valid and taken, 13 is not valid and refused
{"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20} 10 is valid and taken, 13 is not valid and refused
{"type": "integer", "multipleOf": 5, "minimum": 0} 10 is valid and taken, 13 is not valid and taken
{"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100000} 10 is valid and taken, 13 is not valid and taken
{"type": "integer", "multipleOf": 4096} 8192 is valid and taken, 13 is not valid and taken
{"type": "number", "multipleOf": 5} 10 is valid and taken, 13 is not valid and taken
{"enum": [5, 20], "maximum": 10} 5 is valid and taken, 20 is not valid and taken
{"type": "string", "enum": ["a", "b"], "pattern": "^a"} "a" is valid and taken, "b" is not valid and taken
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
