#!/usr/bin/env bash
# Three packages describe a parameter `Optional[int]` of a tool so that null is no value of its schema: transformers 5.24.0
# (`get_json_schema`) and smolagents 1.26.0, which has it from there, write {"type": "integer", "nullable": true}, a
# keyword of OpenAPI 3.0 that JSON Schema does not know; aisuite 0.2.0 writes {"type": "integer"}. Without a default the
# parameter is required, so that a server which holds calls to their schemas makes the model invent a number. pydantic 2.14.4
# writes `anyOf` with null, and transformers itself a list of types for `Literal[1, None]` and `int | str`. jsonschema 4.26.0
# refuses null where the schema does.
#
# Guessed before: null is in `type` or `anyOf`. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  transformers==5.24.0 smolagents==1.26.0 aisuite==0.2.0 pydantic==2.14.4 docstring-parser==0.18.0 jsonschema==4.26.0 \
  jinja2==3.1.6

cat >"$folder/optional.py" <<'PYTHON'
import json
from typing import Literal, Optional

from aisuite.utils.tools import Tools
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from smolagents import tool
from transformers.utils import get_json_schema


def book(seat: Optional[int], row: Literal[1, None], notes: list[int | None]) -> str:
    """Book a seat.

    Args:
        seat: the seat
        row: the row
        notes: some notes
    """
    return ""


def plain(seat: Optional[int]) -> str:
    """Book a seat.

    Args:
        seat: the seat
    """
    return ""


described = get_json_schema(book)["function"]["parameters"]
schemas = {
    "transformers": described["properties"]["seat"],
    "transformers, Literal[1, None]": described["properties"]["row"],
    "transformers, list[int | None]": described["properties"]["notes"]["items"],
    "smolagents": tool(plain).inputs["seat"],
    "aisuite": Tools([plain]).tools()[0]["function"]["parameters"]["properties"]["seat"],
    "pydantic": TypeAdapter(Optional[int]).json_schema(),
}
print("required", described["required"])
for name, schema in schemas.items():
    schema.pop("description", None)
    print(f"{name}: {json.dumps(schema)}, null: {Draft202012Validator(schema).is_valid(None)}")
PYTHON
seen=$("$python" -W ignore "$folder/optional.py" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
required ['seat', 'row', 'notes']
transformers: {"type": "integer", "nullable": true}, null: False
transformers, Literal[1, None]: {"type": ["integer", "null"], "enum": [1, null]}, null: True
transformers, list[int | None]: {"type": "integer", "nullable": true}, null: False
smolagents: {"type": "integer", "nullable": true}, null: False
aisuite: {"type": "integer"}, null: False
pydantic: {"anyOf": [{"type": "integer"}, {"type": "null"}]}, null: True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
