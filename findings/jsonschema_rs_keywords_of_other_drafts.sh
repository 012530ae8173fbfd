#!/usr/bin/env bash
# jsonschema_rs 0.61.2 asserts keywords that a draft does not have: `dependencies` in 2019-09 and 2020-12, which split it
# into two keywords, and `contentEncoding` and `contentMediaType` in draft 6, which knows neither (in draft 7, which has
# them, it asserts them, too; in later drafts it does not). jsonschema 4.26.0 asserts none of these: an unknown keyword says
# nothing there, and content is not looked into. So a schema accepts a value by one package and refuses it by the other.
#
# Guessed before: both leave unknown keywords alone, and formats are the only thing on which they differ by default.
# Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check jsonschema==4.26.0 jsonschema-rs==0.61.2

seen=$("$python" -W ignore - <<'PYTHON'
import json

import jsonschema
import jsonschema_rs

DRAFTS = ("Draft6Validator", "Draft7Validator", "Draft201909Validator", "Draft202012Validator")
for schema, value in (
    ({"dependencies": {"a": ["b"]}}, {"a": 1}),
    ({"contentEncoding": "base64"}, "%%"),
    ({"contentMediaType": "application/json"}, "{"),
):
    print(json.dumps(schema), json.dumps(value))
    for package in (jsonschema, jsonschema_rs):
        answers = [getattr(package, draft)(schema).is_valid(value) for draft in DRAFTS]
        print(f"  {package.__name__}:", *answers)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"dependencies": {"a": ["b"]}} {"a": 1}
  jsonschema: False False True True
  jsonschema_rs: False False False False
{"contentEncoding": "base64"} "%%"
  jsonschema: True True True True
  jsonschema_rs: False False True True
{"contentMediaType": "application/json"} "{"
  jsonschema: True True True True
  jsonschema_rs: False False True True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
