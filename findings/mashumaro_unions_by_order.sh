#!/usr/bin/env bash
# mashumaro 3.23 reads a union by calling its members in order, and `list[str]` takes whatever can be iterated over: of `list[str] |
# dict[str, int]` the answer {"tea": 3} is ['tea'], of `list[str] | str` "tea" is ['t', 'e', 'a'], without an error, though both are
# values of the schema that it writes (`build_json_schema`). Its schema of `dict[int, str]` has "propertyNames": {"type": "integer"},
# so that {} alone is valid, while it reads {"1": ...}. The bounds of `Annotated[int | None, Minimum(1), Maximum(7)]` are not in
# the schema, nor checked, those of `Annotated[int, ...] | None` are written. jsonschema 4.26.0 says what is valid.
#
# Guessed before: the dictionary and the text, a pattern of integers for keys, and the bounds. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check mashumaro==3.23 jsonschema==4.26.0

cat >"$folder/read.py" <<'PYTHON'
import json
from typing import Annotated, Union

from jsonschema import Draft202012Validator
from mashumaro.codecs.json import JSONDecoder
from mashumaro.jsonschema import build_json_schema
from mashumaro.jsonschema.annotations import Maximum, Minimum

cases = (
    ("list[str] | dict[str, int]", Union[list[str], dict[str, int]], '{"tea": 3}'),
    ("dict[str, int] | list[str]", Union[dict[str, int], list[str]], '{"tea": 3}'),
    ("list[str] | str", Union[list[str], str], '"tea"'),
    ("str | list[str]", Union[str, list[str]], '"tea"'),
    ("dict[int, str]", dict[int, str], '{"1": "tea"}'),
    ("bounds around None", Annotated[Union[int, None], Minimum(1), Maximum(7)], "85"),
    ("bounds beside None", Union[Annotated[int, Minimum(1), Maximum(7)], None], "85"),
)
for name, kind, text in cases:
    schema = build_json_schema(kind).to_dict()
    valid = "valid" if Draft202012Validator(schema).is_valid(json.loads(text)) else "not valid"
    print(f"{name}: {text} is {valid}, read as {JSONDecoder(kind).decode(text)}")
PYTHON

seen=$("$python" "$folder/read.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
list[str] | dict[str, int]: {"tea": 3} is valid, read as ['tea']
dict[str, int] | list[str]: {"tea": 3} is valid, read as {'tea': 3}
list[str] | str: "tea" is valid, read as ['t', 'e', 'a']
str | list[str]: "tea" is valid, read as tea
dict[int, str]: {"1": "tea"} is not valid, read as {1: 'tea'}
bounds around None: 85 is valid, read as 85
bounds beside None: 85 is not valid, read as 85
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
