#!/usr/bin/env bash
# llguidance 1.9.1 takes no `\/` in a JSON string, and no `\uXXXX` of a character that JSON lets stand as it is. JSON
# permits both (RFC 8259, section 7), PHP's `json_encode` writes `<\/a>` and `\u00e9`, and models learn from it.
# The escapes that must be, and `\b`, `\f`, `\t`, are taken, so a model may write the backslash and then has to
# write another letter behind it than it meant.
#
# Guessed before: all of JSON's escapes are taken. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1

seen=$("$python" -W ignore - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
for text in (r'"\b\f\n\r\t\"\\"', r'"\u0001"', r'"</a>"', r'"<\/a>"', r'"\u0041"', r'"\u00e9"', '"\u00e9"'):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema('{"type": "string"}'))
    written = list(text.encode())
    json.loads(text)
    print(ascii(text), matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
'"\\b\\f\\n\\r\\t\\"\\\\"' True
'"\\u0001"' True
'"</a>"' True
'"<\\/a>"' False
'"\\u0041"' False
'"\\u00e9"' False
'"\xe9"' True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
