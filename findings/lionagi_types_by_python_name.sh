#!/usr/bin/env bash
# lionagi 0.36.0 describes the parameters of a tool by the names of their Python types where it does not know them: `Literal["C", "F"]` is
# {"type": "Literal"}, `Optional[str]` {"type": "Optional"}, `datetime` {"type": "datetime"}, a pydantic model {"type": "Place"},
# none of which JSON Schema has (jsonschema 4.26.0 calls each malformed), so that a server which holds calls to their schemas
# refuses the tool. An `int` is any number, 1.5 is valid; lists and dictionaries have no types of what they hold; and every
# parameter is required, those with a default, too. With `request_options` a tool has the schema of a model, as pydantic writes it.
#
# Guessed before: the choices, an integer, and a model's own schema. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check lionagi==0.36.0 pydantic==2.14.4 jsonschema==4.26.0

seen=$(cd "$folder" && "$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
from datetime import datetime
from typing import Literal, Optional

from jsonschema import Draft202012Validator, SchemaError
from lionagi.protocols.action.tool import Tool
from pydantic import BaseModel


class Place(BaseModel):
    city: str


def book(
    place: Place,
    unit: Literal["C", "F"],
    when: datetime,
    days: int,
    seats: list[int],
    counts: dict[str, int],
    note: Optional[str] = None,
    pages: int = 3,
) -> str:
    """Book."""
    return ""


schema = Tool(func_callable=book).tool_schema["function"]["parameters"]
for name, sent in schema["properties"].items():
    sent = {key: value for key, value in sent.items() if value is not None}
    try:
        Draft202012Validator.check_schema(sent)
        said = "well-formed"
    except SchemaError:
        said = "malformed"
    print(f"{name}: {json.dumps(sent)} {said}")
print("required", schema["required"])


class Trip(BaseModel):
    unit: Literal["C", "F"]
    days: int = 3


def travel(**given) -> str:
    """Travel."""
    return ""


schema = Tool(func_callable=travel, request_options=Trip).tool_schema["function"]["parameters"]
print("request_options:", json.dumps(schema["properties"]["unit"]), schema["required"])
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
place: {"type": "Place"} malformed
unit: {"type": "Literal"} malformed
when: {"type": "datetime"} malformed
days: {"type": "number"} well-formed
seats: {"type": "array"} well-formed
counts: {"type": "object"} well-formed
note: {"type": "Optional"} malformed
pages: {"type": "number"} well-formed
required ['place', 'unit', 'when', 'days', 'seats', 'counts', 'note', 'pages']
request_options: {"enum": ["C", "F"], "title": "Unit", "type": "string"} ['unit']
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
