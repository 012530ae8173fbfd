#!/usr/bin/env bash
# msgspec 0.22.0 describes more than it reads. A float with `Meta(multiple_of=0.1)` is {"type": "number", "multipleOf": 0.1}, and
# of the 101 tenths from 0 to 10 it reads eight (0, 0.1, 0.2, 0.4, 0.8 and so on: what `math.fmod` leaves nothing of); jsonschema
# 4.26.0 takes 68 by the same schema, jsonschema_rs 0.61.2 and pydantic 2.14.4 all. Quarters are all read. A `timedelta` is a string of
# format `duration`, which may have weeks, months and years (RFC 3339, appendix A): "P1W" is an error.
#
# Guessed before: the tenths that the validators take, and weeks, which have one length. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  msgspec==0.22.0 jsonschema==4.26.0 jsonschema-rs==0.61.2 pydantic==2.14.4

seen=$("$python" -W ignore - <<'PYTHON'
import json
from datetime import timedelta
from typing import Annotated

import jsonschema_rs
import msgspec
from jsonschema import Draft202012Validator
from pydantic import Field, TypeAdapter, ValidationError


def reads(kind, text):
    try:
        msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        return False
    return True


def pydantic_reads(adapter, text):
    try:
        adapter.validate_json(text)
    except ValidationError:
        return False
    return True


for step, count in ((0.1, 101), (0.25, 41)):
    kind = Annotated[float, msgspec.Meta(multiple_of=step)]
    schema = msgspec.json.schema(kind)
    texts = [str(round(index * step, 2)) for index in range(count)]
    adapter = TypeAdapter(Annotated[float, Field(multiple_of=step)])
    print(json.dumps(schema), "of", count)
    read = [text for text in texts if reads(kind, text)]
    print("  msgspec", len(read), *read[:8])
    print("  jsonschema", sum(Draft202012Validator(schema).is_valid(json.loads(text)) for text in texts))
    print("  jsonschema_rs", sum(jsonschema_rs.is_valid(schema, json.loads(text)) for text in texts))
    print("  pydantic", sum(pydantic_reads(adapter, text) for text in texts))
print(msgspec.json.schema(timedelta))
for text in ('"P1D"', '"PT1H"', '"P1W"', '"P1M"', '"P1Y"'):
    print(" ", text, reads(timedelta, text), pydantic_reads(TypeAdapter(timedelta), text))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"type": "number", "multipleOf": 0.1} of 101
  msgspec 8 0.0 0.1 0.2 0.4 0.8 1.6 3.2 6.4
  jsonschema 68
  jsonschema_rs 101
  pydantic 101
{"type": "number", "multipleOf": 0.25} of 41
  msgspec 41 0.0 0.25 0.5 0.75 1.0 1.25 1.5 1.75
  jsonschema 41
  jsonschema_rs 41
  pydantic 41
{'type': 'string', 'format': 'duration'}
  "P1D" True True
  "PT1H" True True
  "P1W" False True
  "P1M" False True
  "P1Y" False True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
