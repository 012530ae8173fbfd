#!/usr/bin/env bash
# formatron 0.5.0 (kbnf 0.4.2) writes constants (`Literal`, `enum`) and names of properties into a grammar as they stand, between the
# quotes of a regular expression: of `Literal["1.5"]` the texts "175" and "1x5" may come, of `Literal["C", "C++"]` "CCC" and never
# "C++", of `Literal["none (yet)"]` "none yet" alone. A quote ends the text, so that `5" disk` comes as what is no JSON. What comes is
# then an error for pydantic, which reads it. SubstringOf, a text of which a part may come, has its quotes so, too.
#
# Guessed before: constants are texts, escaped as JSON has them. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check formatron==0.5.0 kbnf==0.4.2 pydantic==2.10.6 numpy==2.2.6

cat >"$folder/run.py" <<'PYTHON'
import json
from typing import Literal

import kbnf
from formatron.formatter import FormatterBuilder
from formatron.schemas.pydantic import ClassSchema

vocabulary = kbnf.Vocabulary({byte: kbnf.Token(bytes([byte])) for byte in range(256)}, {byte: chr(byte) for byte in range(256)})


def taken(kind, text):
    builder = FormatterBuilder()
    builder.append_str(f"{builder.json(type('M', (ClassSchema,), {'__annotations__': kind}))}")
    formatter = builder.build(vocabulary, lambda ids: bytes(ids).decode())
    engine = kbnf.Engine(formatter.grammar_str, vocabulary)
    try:
        for byte in text.encode():
            engine.try_accept_new_token(byte)
    except ValueError:
        return False
    return engine.is_finished()


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


cases = (
    ({"a": Literal["1.5"]}, ('{"a": "1.5"}', '{"a": "175"}')),
    ({"a": Literal["C", "C++"]}, ('{"a": "C++"}', '{"a": "CCC"}')),
    ({"a": Literal["none (yet)"]}, ('{"a": "none (yet)"}', '{"a": "none yet"}')),
    ({"a": Literal['5" disk']}, ('{"a": "5\\" disk"}', '{"a": "5" disk"}')),
    ({"a.b": int}, ('{"a.b": 1}', '{"axb": 1}')),
)
for kind, texts in cases:
    for text in texts:
        print(f"{text}: {'taken' if taken(kind, text) else 'refused'}{'' if is_json(text) else ', though it is no JSON'}")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"a": "1.5"}: taken
{"a": "175"}: taken
{"a": "C++"}: refused
{"a": "CCC"}: taken
{"a": "none (yet)"}: refused
{"a": "none yet"}: taken
{"a": "5\" disk"}: refused
{"a": "5" disk"}: taken, though it is no JSON
{"a.b": 1}: taken
{"axb": 1}: taken
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
