#!/usr/bin/env bash
# lm-format-enforcer 0.11.3 holds nothing of what a tuple's places are: of `tuple[int, str]`, as pydantic writes it (`prefixItems`), ["x", 1]
# and [null, {}] may come, while the items of a list are held. Bounds of numbers hold nothing there nor in outlines-core 0.2.14: of an
# integer from 1 to 7 comes 85, of a score from 0 to 1 comes 8.5; nor does `maxProperties`, and `minProperties` in the first. Lengths of
# lists and texts are held in both, so that a schema looks as if it were. Neither says so. jsonschema 4.26.0 says what is valid.
#
# Guessed before: places held as items are, and an error for the keywords that are not. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check lm-format-enforcer==0.11.3 outlines-core==0.2.14 jsonschema==4.26.0

cat >"$folder/run.py" <<'PYTHON'
import json
import re

from jsonschema import Draft202012Validator
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema


def by_enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


def by_outlines(schema, text):
    return bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), text))


number, text = {"type": "integer"}, {"type": "string"}
cases = (
    ("tuple[int, str]", {"type": "array", "prefixItems": [number, text], "minItems": 2, "maxItems": 2}, ('[1,"x"]', '["x",1]', "[null,{}]", '[1,"x",2]')),
    ("list[int]", {"type": "array", "items": number}, ("[1,2]", '["x"]')),
    ("an integer from 1 to 7", {"type": "integer", "minimum": 1, "maximum": 7}, ("5", "85")),
    ("a number from 0 to 1", {"type": "number", "minimum": 0, "maximum": 1}, ("0.5", "8.5")),
    ("a dictionary of one", {"type": "object", "additionalProperties": number, "minProperties": 1, "maxProperties": 1}, ('{"a":1}', "{}", '{"a":1,"b":2}')),
)
for name, schema, texts in cases:
    for written in texts:
        valid = Draft202012Validator(schema).is_valid(json.loads(written))
        seen = [("takes" if reader(schema, written) else "refuses") for reader in (by_enforcer, by_outlines)]
        print(f"{name}: {written} is {'valid' if valid else 'not valid'}, lm-format-enforcer {seen[0]} it, outlines-core {seen[1]} it")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
tuple[int, str]: [1,"x"] is valid, lm-format-enforcer takes it, outlines-core takes it
tuple[int, str]: ["x",1] is not valid, lm-format-enforcer takes it, outlines-core refuses it
tuple[int, str]: [null,{}] is not valid, lm-format-enforcer takes it, outlines-core refuses it
tuple[int, str]: [1,"x",2] is not valid, lm-format-enforcer refuses it, outlines-core refuses it
list[int]: [1,2] is valid, lm-format-enforcer takes it, outlines-core takes it
list[int]: ["x"] is not valid, lm-format-enforcer refuses it, outlines-core refuses it
an integer from 1 to 7: 5 is valid, lm-format-enforcer takes it, outlines-core takes it
an integer from 1 to 7: 85 is not valid, lm-format-enforcer takes it, outlines-core takes it
a number from 0 to 1: 0.5 is valid, lm-format-enforcer takes it, outlines-core takes it
a number from 0 to 1: 8.5 is not valid, lm-format-enforcer takes it, outlines-core takes it
a dictionary of one: {"a":1} is valid, lm-format-enforcer takes it, outlines-core takes it
a dictionary of one: {} is not valid, lm-format-enforcer takes it, outlines-core refuses it
a dictionary of one: {"a":1,"b":2} is not valid, lm-format-enforcer takes it, outlines-core takes it
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
