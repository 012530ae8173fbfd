#!/usr/bin/env bash
# lm-format-enforcer 0.11.3 ends a constant of a JSON schema at its first quote: under {"enum": ["5\" disk"]}, the text
# "5" is all that can be written; `const` is the same. A line break within a constant is written as it
# is, which is no JSON. A backslash is escaped.
#
# Guessed before: quotes and line breaks are escaped, as backslashes are. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check lm-format-enforcer==0.11.3

seen=$("$python" -W ignore - <<'PYTHON'
import json

from lmformatenforcer import JsonSchemaParser


def takes(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


for value in ("disk", 'a "b"', "a\\b", "a\nb"):
    first = value.partition('"')[0]
    for text in dict.fromkeys((json.dumps(value), f'"{value}"', f'"{first}"')):
        found = [takes({"type": "string", **schema}, text) for schema in ({"enum": [value]}, {"const": value})]
        print(f"{ascii(value)} as {ascii(text)}: enum {found[0]}, const {found[1]}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
'disk' as '"disk"': enum True, const True
'a "b"' as '"a \\"b\\""': enum False, const False
'a "b"' as '"a "b""': enum False, const False
'a "b"' as '"a "': enum True, const True
'a\\b' as '"a\\\\b"': enum True, const True
'a\\b' as '"a\\b"': enum False, const False
'a\nb' as '"a\\nb"': enum False, const False
'a\nb' as '"a\nb"': enum True, const True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
