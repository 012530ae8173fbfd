#!/usr/bin/env bash
# llguidance 1.9.1 lets a JSON string hold a quote or a backslash that its `pattern` excludes: under
# {"type": "string", "pattern": "^[^\"]*$"} the text "a\"b" is accepted, under "^[^\\]*$" the text
# "a\\b". An excluded letter is refused. With U+0000 excluded, too, the quote is refused: the escapes
# \" and \\ are let in by a set that holds all of U+0000 to U+001F, which are written as escapes.
# `re` refuses each of these texts. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1

seen=$("$python" - <<'PYTHON'
import json
import re

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(pattern, text):
    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.get_error(), matcher.get_error()
    written = list(json.dumps(text).encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


for pattern, text in (
    (r'^[^"]*$', 'a"b'),
    (r"^[^\\]*$", "a\\b"),
    (r"^[^x]*$", "axb"),
    (r'^[^"\x00]*$', 'a"b'),
):
    print(pattern, accepts(pattern, text), bool(re.search(pattern, text)))
PYTHON
)
printf '%s\n' "$seen"
[ "$seen" = '^[^"]*$ True False
^[^\\]*$ True False
^[^x]*$ False False
^[^"\x00]*$ False False' ]
echo "as described"
