#!/usr/bin/env bash
# msgspec 0.22.0, `convert` of objects whose types extend `str`, `int` and `float`, as those of NumPy 2.4.6's `str_` and `float64` do, to
# fields of these types. Of an `int` it makes a plain one. A `str` it keeps as the object that it is, which `encode` refuses, so that
# the Struct it has just made cannot be written. A `float` it refuses. json writes all three, orjson 3.11.4 no float.
#
# Guessed before: it takes all three and makes plain values of them. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check msgspec==0.22.0 orjson==3.11.4 numpy==2.4.6

seen=$("$python" -W ignore - <<'PYTHON'
import json

import msgspec
import numpy
import orjson


class Word(str):
    pass


class Number(int):
    pass


class Real(float):
    pass


class Kept(msgspec.Struct):
    text: str = ""
    count: int = 0
    share: float = 0.0


def tried(work):
    try:
        return work()
    except Exception as error:
        return type(error).__name__


def written(writer, value):
    return tried(lambda: "written" if writer(value) else "")


for field, value in (
    ("text", Word("a")),
    ("text", numpy.str_("a")),
    ("count", Number(3)),
    ("share", Real(0.5)),
    ("share", numpy.float64(0.5)),
):
    print(type(value).__name__, value)
    made = tried(lambda: msgspec.convert({field: value}, Kept))
    if isinstance(made, Kept):
        print("  convert keeps it:", getattr(made, field) is value, "and encode:", written(msgspec.json.encode, made))
    else:
        print("  convert:", made, "and encode of it alone:", written(msgspec.json.encode, value))
    print("  json:", written(json.dumps, value), "orjson:", written(orjson.dumps, value))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Word a
  convert keeps it: True and encode: TypeError
  json: written orjson: written
str_ a
  convert keeps it: True and encode: TypeError
  json: written orjson: written
Number 3
  convert keeps it: False and encode: written
  json: written orjson: written
Real 0.5
  convert: ValidationError and encode of it alone: TypeError
  json: written orjson: TypeError
float64 0.5
  convert: ValidationError and encode of it alone: TypeError
  json: written orjson: TypeError
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
