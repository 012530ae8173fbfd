#!/usr/bin/env bash
# outlines-core 0.2.14 writes the name of a property between two quotes as it stands: of a property `5" disk` the regex of an
# object has "5" disk": 1, which is no JSON, and refuses "5\\" disk". A backslash and a line end in a name are left as they are, too.
# A constant that is a text (`const`, `enum`) is escaped. So an object with such a key cannot be read, whatever its
# values are.
#
# Guessed before: names are escaped, as constants are. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check outlines-core==0.2.14

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import re

from outlines_core.json_schema import build_regex_from_schema

for name in ('5" disk', "a\\b", "a\nb"):
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}
    for what, given, whole in (("a name", schema, json.dumps({name: 1})), ("a constant", {"const": name}, json.dumps(name))):
        plain = whole.replace(json.dumps(name), f'"{name}"')
        pattern = build_regex_from_schema(json.dumps(given))
        taken = [kind for kind, text in (("JSON", whole), ("as it stands", plain)) if re.fullmatch(pattern, text)]
        print(f"{name!r} as {what}: {', '.join(taken) or 'nothing'}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
'5" disk' as a name: as it stands
'5" disk' as a constant: JSON
'a\\b' as a name: as it stands
'a\\b' as a constant: JSON
'a\nb' as a name: as it stands
'a\nb' as a constant: JSON
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
