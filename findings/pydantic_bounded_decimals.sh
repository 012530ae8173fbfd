#!/usr/bin/env bash
# pydantic 2.14.4 describes a `Decimal` as a number or any text: {"anyOf": [{"type": "number"}, {"type": "string"}]}. Bounds stand at
# the number alone, and digits and places nowhere: of `Field(ge=0, le=1)` the texts "5" and "abc" are valid and refused, and of
# `Field(max_digits=4, decimal_places=2)` 12345.678 is. 2.12.5 describes the text by a pattern, which looks ahead, so that llguidance 1.9.1
# refuses the whole schema; with digits and places, the pattern has an alternative without an end, and "abc" matches it, too.
# jsonschema 4.26.0 says what is valid.
#
# Guessed before: a pattern that holds digits and places, and bounds that hold. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/seen.py" <<'PYTHON'
from decimal import Decimal
from typing import Annotated

import jsonschema
import llguidance
import pydantic

print(f"pydantic {pydantic.VERSION}")
for name, field in {"ge=0, le=1": pydantic.Field(ge=0, le=1), "digits": pydantic.Field(max_digits=4, decimal_places=2)}.items():
    adapter = pydantic.TypeAdapter(Annotated[Decimal, field])
    schema = adapter.json_schema()
    patterns = [one for one in schema["anyOf"] if "pattern" in one]
    held = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema), None)
    print(f"  {name}: {len(patterns)} patterns; llguidance {'refuses it' if held else 'takes it'}")
    for value in ("5", "abc", 5, 12345.678):
        try:
            adapter.validate_python(value)
            read = "read"
        except pydantic.ValidationError:
            read = "refused"
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        print(f"    {value!r} is {'valid' if valid else 'not valid'} and {read}")
PYTHON
for version in 2.12.5 2.14.4; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/python" -m pip install --quiet --disable-pip-version-check \
    pydantic==$version jsonschema==4.26.0 llguidance==1.9.1
  "$folder/$version/bin/python" -W ignore "$folder/seen.py" >>"$folder/seen"
done
seen=$(cat "$folder/seen")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
pydantic 2.12.5
  ge=0, le=1: 1 patterns; llguidance refuses it
    '5' is valid and refused
    'abc' is not valid and refused
    5 is not valid and refused
    12345.678 is not valid and refused
  digits: 1 patterns; llguidance refuses it
    '5' is valid and read
    'abc' is valid and refused
    5 is valid and read
    12345.678 is valid and refused
pydantic 2.14.4
  ge=0, le=1: 0 patterns; llguidance takes it
    '5' is valid and refused
    'abc' is valid and refused
    5 is not valid and refused
    12345.678 is not valid and refused
  digits: 0 patterns; llguidance takes it
    '5' is valid and read
    'abc' is valid and refused
    5 is valid and read
    12345.678 is valid and refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
