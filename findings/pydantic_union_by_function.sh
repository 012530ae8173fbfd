#!/usr/bin/env bash
# pydantic 2.14.4 describes a union whose member a function chooses (`Discriminator(function)`, `Tag`) as `oneOf`: exactly
# one of the members' schemas. Where one model has what the other has and one field more, whatever the larger one takes
# is a value of the smaller one's schema, too: jsonschema 4.26.0 refuses all that pydantic takes, and takes what pydantic refuses
# ({"x": 1, "y": "text"}). A union without a function is `anyOf`. Closed models (`extra="forbid"`) of which one requires what
# the other has not do differ.
#
# Guessed before: `anyOf`, as for other unions. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check pydantic==2.14.4 jsonschema==4.26.0

seen=$("$python" -W ignore - <<'PYTHON'
import json
from typing import Annotated

from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Discriminator, Tag, TypeAdapter, ValidationError


class Point(BaseModel):
    x: int


class Pair(Point):
    y: int = 0


class ClosedPoint(Point):
    model_config = ConfigDict(extra="forbid")


class ClosedPair(Pair):
    model_config = ConfigDict(extra="forbid")
    y: int


def kind(value):
    return "pair" if "y" in value else "point"


def chosen(point, pair):
    return Annotated[Annotated[point, Tag("point")] | Annotated[pair, Tag("pair")], Discriminator(kind)]


for name, of in (
    ("by a function", chosen(Point, Pair)),
    ("without", Point | Pair),
    ("by a function, closed", chosen(ClosedPoint, ClosedPair)),
):
    adapter = TypeAdapter(of)
    schema = adapter.json_schema()
    print(name, [keyword for keyword in schema if keyword.endswith("Of")])
    for text in ('{"x": 1}', '{"x": 1, "y": 2}', '{"x": 1, "y": "text"}'):
        try:
            taken = type(adapter.validate_json(text)).__name__
        except ValidationError:
            taken = "refused"
        print(" ", text, taken, Draft202012Validator(schema).is_valid(json.loads(text)))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
by a function ['oneOf']
  {"x": 1} Point False
  {"x": 1, "y": 2} Pair False
  {"x": 1, "y": "text"} refused True
without ['anyOf']
  {"x": 1} Point True
  {"x": 1, "y": 2} Pair True
  {"x": 1, "y": "text"} Point True
by a function, closed ['oneOf']
  {"x": 1} ClosedPoint True
  {"x": 1, "y": 2} ClosedPair True
  {"x": 1, "y": "text"} refused False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
