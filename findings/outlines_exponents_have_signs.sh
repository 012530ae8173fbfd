#!/usr/bin/env bash
# outlines-core 0.2.14 writes a schema's `number` as a regex whose exponent has a sign: 1e+5 and 1e-5 are taken, 1e5
# is not, although JSON (RFC 8259, section 6) needs no sign, and models write 1e5 as Python's and
# JavaScript's own sources do. An `integer` may be `-0`.
#
# Guessed before: 1e5 is taken. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check outlines-core==0.2.14

seen=$("$python" -W ignore - <<'PYTHON'
import json
import re

from outlines_core.json_schema import build_regex_from_schema

for kind, texts in (("number", ("1e5", "1E5", "1e+5", "1e-5", "1.5e3", "-0.0")), ("integer", ("-0", "12"))):
    pattern = build_regex_from_schema(json.dumps({"type": kind}))
    print(kind, {text: bool(re.fullmatch(pattern, text)) for text in texts})
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
number {'1e5': False, '1E5': False, '1e+5': True, '1e-5': True, '1.5e3': False, '-0.0': True}
integer {'-0': True, '12': True}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
