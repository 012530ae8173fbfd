#!/usr/bin/env bash
# A string with `pattern` and `maxLength`, as pydantic's `Field(pattern=..., max_length=...)` writes it: four libraries that
# mask tokens read it in four ways. outlines-core 0.2.14 drops the pattern without a word, so that any text of that length comes;
# xgrammar 0.2.9 drops the length, with a line on stderr; lm-format-enforcer 0.11.3 refuses it; llguidance 1.9.1 holds both. Of
# `pattern` and `format` xgrammar holds the format and says nothing, outlines-core and lm-format-enforcer the pattern, and with
# `format` and a length these two drop the format: `bbb` is a date.
#
# Guessed before: both are held, or the schema is refused. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0 \
  apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4 outlines-core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.9.1
"$python" -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.9

seen=$("$python" -W ignore - 2>"$folder/log" <<'PYTHON'
import json
import re

import xgrammar
from llguidance import LLMatcher, LLTokenizer
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema

bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
kind = xgrammar.VocabType.BYTE_FALLBACK
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(bytes_and_end, vocab_type=kind, stop_token_ids=[256]))
tokenizer = LLTokenizer("byte")


def by_llguidance(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if matcher.get_error():
        raise ValueError
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


def by_outlines(schema, text):
    return bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), text))


def by_enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


TEXTS = ("a", "aaa", "aaaa", "bbb", "2", "2024-01-01", "1999-01-01")
for keywords in (
    {"pattern": "^a+$"},
    {"pattern": "^a+$", "maxLength": 3},
    {"pattern": "^a+$", "minLength": 3},
    {"pattern": "^2[0-9-]*$", "format": "date"},
    {"format": "date", "minLength": 3},
):
    print(json.dumps(keywords))
    for reads in (by_llguidance, by_xgrammar, by_outlines, by_enforcer):
        try:
            taken = [text for text in TEXTS if reads({"type": "string"} | keywords, f'"{text}"')]
        except Exception:
            taken = ["refused"]
        print("  ", reads.__name__, *taken)
PYTHON
)
printf '%s\n' "$seen"
echo "lines of xgrammar that something is ignored: $(grep -c ignoring "$folder/log")"
expected=$(cat <<'TEXT'
{"pattern": "^a+$"}
   by_llguidance a aaa aaaa
   by_xgrammar a aaa aaaa
   by_outlines a aaa aaaa
   by_enforcer a aaa aaaa
{"pattern": "^a+$", "maxLength": 3}
   by_llguidance a aaa
   by_xgrammar a aaa aaaa
   by_outlines a aaa bbb 2
   by_enforcer refused
{"pattern": "^a+$", "minLength": 3}
   by_llguidance aaa aaaa
   by_xgrammar a aaa aaaa
   by_outlines aaa aaaa bbb 2024-01-01 1999-01-01
   by_enforcer refused
{"pattern": "^2[0-9-]*$", "format": "date"}
   by_llguidance 2024-01-01
   by_xgrammar 2024-01-01 1999-01-01
   by_outlines 2 2024-01-01
   by_enforcer 2 2024-01-01
{"format": "date", "minLength": 3}
   by_llguidance 2024-01-01 1999-01-01
   by_xgrammar 2024-01-01 1999-01-01
   by_outlines aaa aaaa bbb 2024-01-01 1999-01-01
   by_enforcer aaa aaaa bbb 2024-01-01 1999-01-01
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
