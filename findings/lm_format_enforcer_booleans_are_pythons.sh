#!/usr/bin/env bash
# lm-format-enforcer 0.11.3 writes the booleans of an `enum` as Python does: under {"enum": [true, false]} the text "true" is refused
# and "True" taken, which is no JSON, also within an object. {"const": true} and an `enum` of a text and null are errors.
# {"type": "boolean"} takes true. pydantic writes `Literal[True, False]` as the first, and `Literal[True]`, a flag that has to be
# set, as the fourth.
#
# Guessed before: true, as JSON has it. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check lm-format-enforcer==0.11.3 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
from typing import Literal

from lmformatenforcer import JsonSchemaParser
from pydantic import TypeAdapter


def takes(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


both = {"enum": [True, False]}
closed = {"type": "object", "properties": {"a": both}, "required": ["a"], "additionalProperties": False}
for schema, *texts in (
    (both, "true", "True"),
    (closed, '{"a": true}', '{"a": True}'),
    ({"type": "boolean"}, "true", "True"),
    ({"const": True}, "true", "True"),
    ({"enum": ["a", None]}, "null", '"a"'),
    (TypeAdapter(Literal[True, False]).json_schema(), "true", "True"),
    (TypeAdapter(Literal[True]).json_schema(), "true", "True"),
):
    print(json.dumps(schema))
    for text in texts:
        try:
            told = "taken" if takes(schema, text) else "refused"
        except Exception as error:
            told = type(error).__name__
        print(f"    {text}: {told}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"enum": [true, false]}
    true: refused
    True: taken
{"type": "object", "properties": {"a": {"enum": [true, false]}}, "required": ["a"], "additionalProperties": false}
    {"a": true}: refused
    {"a": True}: taken
{"type": "boolean"}
    true: taken
    True: refused
{"const": true}
    true: AttributeError
    True: AttributeError
{"enum": ["a", null]}
    null: Exception
    "a": Exception
{"enum": [true, false], "type": "boolean"}
    true: refused
    True: taken
{"const": true, "type": "boolean"}
    true: AttributeError
    True: AttributeError
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
