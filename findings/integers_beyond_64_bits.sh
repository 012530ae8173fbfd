#!/usr/bin/env bash
# An `integer` of a JSON schema has no bound, and what a model writes may have twenty digits and more (an id, a hash). orjson 3.13.0 reads
# one of 2^64 and more as a float, without a word: 18446744073709551616 is 1.8446744073709552e+19, and the next integer is the
# same number. jsonschema 4.26.0 takes the float as an `integer`, so that checking what was read finds nothing, and orjson
# itself refuses to write the integer. pysimdjson 7.0.2 raises an error. msgspec 0.23.0, python-rapidjson 1.25, ujson 6.1.0,
# jiter 0.19.0 and Python's json read the integer. A `maximum` in the schema helps.
#
# Guessed before: an error, or the integer. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  orjson==3.13.0 pysimdjson==7.0.2 msgspec==0.23.0 python-rapidjson==1.25 ujson==6.1.0 jiter==0.19.0 jsonschema==4.26.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json

import jiter
import msgspec
import orjson
import rapidjson
import simdjson
import ujson
from jsonschema import Draft202012Validator


def tried(function, value):
    try:
        return repr(function(value))
    except Exception as error:
        return type(error).__name__


for number in (2**64 - 1, 2**64, 2**64 + 1):
    text = str(number)
    print(text)
    for name, read in (
        ("json", json.loads),
        ("orjson", orjson.loads),
        ("pysimdjson", simdjson.loads),
        ("msgspec", msgspec.json.decode),
        ("rapidjson", rapidjson.loads),
        ("ujson", ujson.loads),
        ("jiter", lambda text: jiter.from_json(text.encode())),
    ):
        print(f"  {name} reads {tried(read, text)}")
    valid = Draft202012Validator({"type": "integer"}).is_valid(orjson.loads(text))
    print(f"  an integer: {valid}; orjson writes {tried(orjson.dumps, number)}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
18446744073709551615
  json reads 18446744073709551615
  orjson reads 18446744073709551615
  pysimdjson reads 18446744073709551615
  msgspec reads 18446744073709551615
  rapidjson reads 18446744073709551615
  ujson reads 18446744073709551615
  jiter reads 18446744073709551615
  an integer: True; orjson writes b'18446744073709551615'
18446744073709551616
  json reads 18446744073709551616
  orjson reads 1.8446744073709552e+19
  pysimdjson reads ValueError
  msgspec reads 18446744073709551616
  rapidjson reads 18446744073709551616
  ujson reads 18446744073709551616
  jiter reads 18446744073709551616
  an integer: True; orjson writes TypeError
18446744073709551617
  json reads 18446744073709551617
  orjson reads 1.8446744073709552e+19
  pysimdjson reads ValueError
  msgspec reads 18446744073709551617
  rapidjson reads 18446744073709551617
  ujson reads 18446744073709551617
  jiter reads 18446744073709551617
  an integer: True; orjson writes TypeError
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
