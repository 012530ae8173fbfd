#!/usr/bin/env bash
# An object that has properties of its own and those of another, as OpenAPI's `allOf` writes inheritance:
#   {"type": "object", "properties": {"b": ...}, "required": ["b"], "allOf": [{"$ref": "#/$defs/A"}]}
# xgrammar 0.2.9 and lm-format-enforcer 0.11.3 write A alone, outlines-core 0.2.14 what is beside A alone: none of them
# can write a valid object, and none says so. With both objects in the list xgrammar takes any JSON,
# outlines-core {"a":1}{"b":2}, one object behind the other. llguidance 1.9.1 writes both, each time.
#
# Guessed before: both objects' properties, or a refusal. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4 jsonschema==4.26.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.9
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 outlines-core==0.2.14 lm-format-enforcer==0.11.3

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import re

import jsonschema
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema

bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
kind = xgrammar.VocabType.BYTE_FALLBACK
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(bytes_and_end, vocab_type=kind, stop_token_ids=[256]))
tokenizer = LLTokenizer("byte")


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


def by_llguidance(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.get_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


def by_outlines(schema, text):
    return bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), text))


def by_enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


def valid(schema, text):
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


a = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
b = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
texts = ('{"a":1,"b":2}', '{"b":2,"a":1}', '{"a":1}', '{"b":2}', '{"a":1}{"b":2}', "7")
for name, schema in (
    ("beside", {"$defs": {"A": a}, **b, "allOf": [{"$ref": "#/$defs/A"}]}),
    ("in the list", {"allOf": [a, b]}),
):
    for reader in (valid, by_xgrammar, by_enforcer, by_outlines, by_llguidance):
        print(f"{name}: {reader.__name__}:", *[text for text in texts if reader(schema, text)])
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
beside: valid: {"a":1,"b":2} {"b":2,"a":1}
beside: by_xgrammar: {"a":1}
beside: by_enforcer: {"a":1}
beside: by_outlines: {"b":2}
beside: by_llguidance: {"b":2,"a":1}
in the list: valid: {"a":1,"b":2} {"b":2,"a":1}
in the list: by_xgrammar: {"a":1,"b":2} {"b":2,"a":1} {"a":1} {"b":2} 7
in the list: by_enforcer: {"a":1,"b":2} {"b":2,"a":1}
in the list: by_outlines: {"a":1}{"b":2}
in the list: by_llguidance: {"a":1,"b":2}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
