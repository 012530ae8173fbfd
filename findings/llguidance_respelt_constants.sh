#!/usr/bin/env bash
# llguidance 1.9.1 does not take a constant of a JSON schema as `json.dumps` writes it: of `const`
# 1.0 it takes the text `1` and refuses `1.0`, of 1e-07 `0.0000001` alone, of 1e+21 22 digits alone,
# of -0.0 `-0`. Of a string with U+007F it takes `\u007f`, and refuses the character itself, which
# JSON need not escape (RFC 8259, section 7). In `enum` it is the same. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1

seen=$("$python" - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.get_error(), matcher.get_error()
    written = list(text.encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


for value, other in (
    (1.0, "1"),
    (1e-7, "0.0000001"),
    (1e21, "1" + "0" * 21),
    (-0.0, "-0"),
    (0.5, "0.50"),
    ("\x7f", '"\\u007f"'),
):
    own = json.dumps(value, ensure_ascii=False)
    assert json.loads(own) == json.loads(other) == value
    for schema in ({"const": value}, {"enum": [value]}):
        print(ascii(own), accepts(schema, own), other, accepts(schema, other))
PYTHON
)
printf '%s\n' "$seen"
twice() { printf '%s\n%s\n' "$1" "$1"; }
expected=$(
  twice "'1.0' False 1 True"
  twice "'1e-07' False 0.0000001 True"
  twice "'1e+21' False 1000000000000000000000 True"
  twice "'-0.0' False -0 True"
  twice "'0.5' True 0.50 False"
  twice "'\"\\x7f\"' False \"\\u007f\" True"
)
[ "$seen" = "$expected" ]
echo "as described"
