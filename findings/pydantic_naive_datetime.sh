#!/usr/bin/env bash
# pydantic 2.14.4 describes a `NaiveDatetime` by what it refuses: its JSON schema is {"type": "string", "format":
# "date-time"}, and a date-time has a zone (RFC 3339), so llguidance 1.9.1 writes one, always. pydantic refuses every text
# with a zone here, and takes those without, which the schema's format excludes. A plain `datetime` takes both.
#
# Guessed before: a schema without the format, or a pattern. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check pydantic==2.14.4 llguidance==1.9.1

seen=$("$python" -W ignore - <<'PYTHON'
import json
from datetime import datetime

from llguidance import LLMatcher, LLTokenizer
from pydantic import NaiveDatetime, TypeAdapter, ValidationError

tokenizer = LLTokenizer("byte")
for kind in (NaiveDatetime, datetime):
    adapter = TypeAdapter(kind)
    schema = json.dumps(adapter.json_schema())
    print(kind.__name__, schema)
    for text in ('"2024-02-29T01:02:03"', '"2024-02-29T01:02:03Z"', '"2024-02-29T01:02:03.5+02:00"'):
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
        written = matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
        try:
            adapter.validate_json(text)
            read = True
        except ValidationError:
            read = False
        print(f"  {text}: written {written}, read {read}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
NaiveDatetime {"format": "date-time", "type": "string"}
  "2024-02-29T01:02:03": written False, read True
  "2024-02-29T01:02:03Z": written True, read False
  "2024-02-29T01:02:03.5+02:00": written True, read False
datetime {"format": "date-time", "type": "string"}
  "2024-02-29T01:02:03": written False, read True
  "2024-02-29T01:02:03Z": written True, read True
  "2024-02-29T01:02:03.5+02:00": written True, read True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
