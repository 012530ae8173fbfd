#!/usr/bin/env bash
# formatron 0.5.0 (kbnf 0.4.2) holds bounds by expressions in which white space belongs to the first alternative alone: under
# `Field(ge=0)` an integer is 0 behind a space, and any other number stands where no space is, so a model that writes
# `{"a": ` may go on with 0 and nothing else. `Field(gt=0)` of a float refuses 0.5, since a number above 0 begins with 1 to 9. A list
# with `min_length` and no `max_length` begins with a comma, `[,1 2]`, which is no JSON, and nothing else is taken.
# Of `min_length=1, max_length=2` the list [1] is refused. Without bounds lists are right.
#
# Guessed before: any number of the range, with and without a space, and lists that are JSON. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check formatron==0.5.0 kbnf==0.4.2 pydantic==2.10.6 numpy==2.2.6

cat >"$folder/run.py" <<'PYTHON'
from typing import Annotated, List

import kbnf
from formatron.formatter import FormatterBuilder
from formatron.schemas.pydantic import ClassSchema
from pydantic import Field

vocabulary = kbnf.Vocabulary({byte: kbnf.Token(bytes([byte])) for byte in range(256)}, {byte: chr(byte) for byte in range(256)})


def taken(kind, text):
    builder = FormatterBuilder()
    builder.append_str(f"{builder.json(type('M', (ClassSchema,), {'__annotations__': {'a': kind}}))}")
    formatter = builder.build(vocabulary, lambda ids: bytes(ids).decode())
    engine = kbnf.Engine(formatter.grammar_str, vocabulary)
    try:
        for byte in text.encode():
            engine.try_accept_new_token(byte)
    except ValueError:
        return False
    return engine.is_finished()


cases = (
    ("int, ge=0", Annotated[int, Field(ge=0)], ("0", "3", "12")),
    ("float, ge=0", Annotated[float, Field(ge=0)], ("0", "0.5", "3.5")),
    ("float, gt=0", Annotated[float, Field(gt=0)], ("0.5", "3.5")),
    ("list, min_length=1", Annotated[List[int], Field(min_length=1)], ("[]", "[1]", "[1, 2]", "[,1 2]")),
    ("list, min_length=1, max_length=2", Annotated[List[int], Field(min_length=1, max_length=2)], ("[1]", "[1, 2]")),
)
for name, kind, values in cases:
    for value in values:
        seen = [taken(kind, '{"a":' + space + value + "}") for space in ("", " ")]
        print(f"{name}: {value} {'taken' if seen[0] else 'refused'}, behind a space {'taken' if seen[1] else 'refused'}")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
int, ge=0: 0 taken, behind a space taken
int, ge=0: 3 taken, behind a space refused
int, ge=0: 12 taken, behind a space refused
float, ge=0: 0 taken, behind a space taken
float, ge=0: 0.5 refused, behind a space refused
float, ge=0: 3.5 taken, behind a space refused
float, gt=0: 0.5 refused, behind a space refused
float, gt=0: 3.5 taken, behind a space taken
list, min_length=1: [] refused, behind a space refused
list, min_length=1: [1] refused, behind a space refused
list, min_length=1: [1, 2] refused, behind a space refused
list, min_length=1: [,1 2] taken, behind a space taken
list, min_length=1, max_length=2: [1] refused, behind a space refused
list, min_length=1, max_length=2: [1, 2] taken, behind a space taken
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
