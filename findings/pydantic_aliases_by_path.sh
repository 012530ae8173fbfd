#!/usr/bin/env bash
# pydantic 2.14.4 describes a field that is read by a path by the name of the field: of `x: int = Field(validation_alias=AliasPath("a",
# "b"))` the schema requires "x", which is not read, so that whatever a server writes that holds the schema is refused: {"x": 1}
# is valid, {"a": {"b": 1}}, which is read, is not. So it is with a path of one name, which is the same as an alias that is a text, and
# has the right name in `AliasChoices`. jsonschema 4.26.0 says what is valid.
#
# Guessed before: objects within objects, or an error, and "a" for the path of one name. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check pydantic==2.14.4 jsonschema==4.26.0
seen=$("$folder/venv/bin/python" -W ignore - <<'PYTHON'
import jsonschema
from pydantic import AliasChoices, AliasPath, BaseModel, Field, ValidationError


class Path(BaseModel):
    x: int = Field(validation_alias=AliasPath("a", "b"))


class Name(BaseModel):
    x: int = Field(validation_alias=AliasPath("a"))


class Choices(BaseModel):
    x: int = Field(validation_alias=AliasChoices(AliasPath("a"), "c"))


for model in (Path, Name, Choices):
    for value in ({"x": 1}, {"a": 1}, {"a": {"b": 1}}):
        try:
            model.model_validate(value)
            read = "read"
        except ValidationError:
            read = "refused"
        valid = jsonschema.Draft202012Validator(model.model_json_schema()).is_valid(value)
        print(f"{model.__name__}: {value} is {'valid' if valid else 'not valid'} and {read}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Path: {'x': 1} is valid and refused
Path: {'a': 1} is not valid and refused
Path: {'a': {'b': 1}} is not valid and read
Name: {'x': 1} is valid and refused
Name: {'a': 1} is not valid and read
Name: {'a': {'b': 1}} is not valid and refused
Choices: {'x': 1} is not valid and refused
Choices: {'a': 1} is valid and read
Choices: {'a': {'b': 1}} is not valid and refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
