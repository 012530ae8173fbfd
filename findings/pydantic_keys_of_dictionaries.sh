#!/usr/bin/env bash
# pydantic 2.14.4 leaves out of a schema what the keys of a dictionary are, but for some types: those of `dict[date, int]` have
# `propertyNames`, those of `dict[int, int]`, `bool`, `float` and `Decimal` nothing, so that a server which holds the schema may write
# the key "a", which pydantic refuses. An `IntEnum` has `propertyNames` with the numbers 1 and 2, which no key is: {} alone is
# valid, though pydantic reads "1". A pattern becomes `patternProperties` without `additionalProperties`, so that a key which does
# not match may hold anything. And of `Literal[1, 2]` pydantic reads no key at all, and describes any. jsonschema 4.26.0 says
# what is valid.
#
# Guessed before: `propertyNames` with a pattern of integers, "1" and "2", and no other keys. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check pydantic==2.14.4 jsonschema==4.26.0
seen=$("$folder/venv/bin/python" -W ignore - <<'PYTHON'
import enum
import json
from datetime import date
from decimal import Decimal
from typing import Annotated, Literal

import jsonschema
from pydantic import Field, TypeAdapter, ValidationError


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


KINDS = {
    "date": date,
    "int": int,
    "bool": bool,
    "float": float,
    "Decimal": Decimal,
    "IntEnum": Level,
    "Literal[1, 2]": Literal[1, 2],
    "pattern ^x": Annotated[str, Field(pattern="^x")],
}
for name, kind in KINDS.items():
    adapter = TypeAdapter(dict[kind, int])
    schema = adapter.json_schema()
    told = []
    for key in ("a", "1"):
        text = json.dumps({key: 1})
        try:
            adapter.validate_json(text)
            read = "read"
        except ValidationError:
            read = "refused"
        check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        valid = check.is_valid(json.loads(text))
        told.append(f"{key} is {'valid' if valid else 'not valid'} and {read}")
    print(f"{name}: {', '.join(told)}")
wrong = jsonschema.Draft202012Validator(TypeAdapter(dict[KINDS["pattern ^x"], int]).json_schema())
print("pattern ^x, a text behind another key is", "valid" if wrong.is_valid({"a": "text"}) else "not valid")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
date: a is not valid and refused, 1 is not valid and refused
int: a is valid and refused, 1 is valid and read
bool: a is valid and refused, 1 is valid and read
float: a is valid and refused, 1 is valid and read
Decimal: a is valid and refused, 1 is valid and read
IntEnum: a is not valid and refused, 1 is not valid and read
Literal[1, 2]: a is valid and refused, 1 is valid and refused
pattern ^x: a is valid and refused, 1 is valid and refused
pattern ^x, a text behind another key is valid
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
