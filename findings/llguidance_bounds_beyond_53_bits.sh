#!/usr/bin/env bash
# llguidance 1.9.1 reads the bounds of an integer as doubles: of {"minimum": 9007199254740993, "maximum": 9007199254740993}, which is 2^53 + 1,
# it takes 9007199254740992 and refuses the only value there is; of an id's bound 1234567890123456789 it refuses the bound itself and
# the 21 integers below it. `minimum` -2^63, as of a 64-bit integer, makes it refuse the schema, and so does 1e20 of a
# number. 2^63 - 1 as `maximum` is exact. jsonschema 4.26.0 says what is valid.
#
# Guessed before: integers, exact. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
for bounds, *values in (
    ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, 2**53, 2**53 + 1),
    ({"maximum": 1234567890123456789}, 1234567890123456768, 1234567890123456769, 1234567890123456789, 1234567890123456790),
    ({"maximum": 2**63 - 1}, 2**63 - 1, 2**63),
    ({"minimum": -(2**63)}, -(2**63)),
    ({"minimum": 10**20}, 10**20),
):
    schema = {"type": "integer", **bounds}
    print(json.dumps(bounds))
    for value in values:
        text = str(value)
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        if matcher.get_error():
            told = "the schema is refused"
        else:
            taken = matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
            told = "taken" if taken else "refused"
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        print(f"    {text} is {'valid' if valid else 'not valid'}: {told}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"minimum": 9007199254740993, "maximum": 9007199254740993}
    9007199254740992 is not valid: taken
    9007199254740993 is valid: refused
{"maximum": 1234567890123456789}
    1234567890123456768 is valid: taken
    1234567890123456769 is valid: refused
    1234567890123456789 is valid: refused
    1234567890123456790 is not valid: refused
{"maximum": 9223372036854775807}
    9223372036854775807 is valid: taken
    9223372036854775808 is not valid: refused
{"minimum": -9223372036854775808}
    -9223372036854775808 is valid: the schema is refused
{"minimum": 100000000000000000000}
    100000000000000000000 is valid: the schema is refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
