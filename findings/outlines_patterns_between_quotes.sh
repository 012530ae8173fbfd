#!/usr/bin/env bash
# outlines-core 0.2.14 puts a schema's `pattern` between two quotes as it stands, without `^` and `$` where it has both.
# With one anchor (`^a`, `a$`) the regex matches no text at all: nothing can be generated. `^a|b$` matches "a and b",
# each with one quote, which is no JSON. `^[^a]$` matches a quote between quotes, `^\S+$` a lone backslash there. Without anchors `a` is
# the whole string, which JSON Schema searches for anywhere in it. Python's `re` finds the first three in "a".
#
# Guessed before: what comes out is a JSON string, whose value the pattern is found in. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check outlines-core==0.2.14

seen=$("$python" - <<'PYTHON'
import json
import re

from outlines_core.json_schema import build_regex_from_schema

TEXTS = ('"a"', '"b"', '"a', 'b"', '"""', '"\\"', '"xa"')
for pattern in ("^a", "a$", "a", "^a|b$", "^[^a]$", r"^\S+$", "^(a|b)$"):
    regex = build_regex_from_schema(json.dumps({"type": "string", "pattern": pattern}))
    print(pattern, "->", regex, "matches", *(text for text in TEXTS if re.fullmatch(regex, text)))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
^a -> ("^a") matches
a$ -> ("a$") matches
a -> ("a") matches "a"
^a|b$ -> ("a|b") matches "a b"
^[^a]$ -> ("[^a]") matches "b" """ "\"
^\S+$ -> ("\S+") matches "a" "b" """ "\" "xa"
^(a|b)$ -> ("(a|b)") matches "a" "b"
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
