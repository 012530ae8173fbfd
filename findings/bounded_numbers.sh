#!/usr/bin/env bash
# A bound on a `number` takes its exponent away: with `minimum` or `maximum`, xgrammar 0.2.9 and llguidance 1.9.1 refuse 1e-7
# and 1E5, which they take without one; xgrammar takes no more than six digits behind the point, too. So under
# {"type": "number", "minimum": 0}, a learning rate of 1e-7 cannot be written by xgrammar at all, and by llguidance as
# 0.0000001. All texts are valid under each schema.
#
# Guessed before: llguidance takes exponents, and both take 0.0000001. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4
"$python" -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.9
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1

seen=$("$python" -W ignore - <<'PYTHON'
import json

import xgrammar

bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
kind = xgrammar.VocabType.BYTE_FALLBACK
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(bytes_and_end, vocab_type=kind, stop_token_ids=[256]))


def accepts(schema, text):
    json.loads(text)
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def other(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    written = list(text.encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


for bound in ({}, {"minimum": 0}, {"maximum": 1000000}, {"exclusiveMinimum": 0}):
    schema = {"type": "number", **bound}
    for text in ("1e-7", "1E5", "0.0000001", "0.000001", "0.5"):
        print(bound, text, "xgrammar", accepts(schema, text), "llguidance", other(schema, text))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{} 1e-7 xgrammar True llguidance True
{} 1E5 xgrammar True llguidance True
{} 0.0000001 xgrammar True llguidance True
{} 0.000001 xgrammar True llguidance True
{} 0.5 xgrammar True llguidance True
{'minimum': 0} 1e-7 xgrammar False llguidance False
{'minimum': 0} 1E5 xgrammar False llguidance False
{'minimum': 0} 0.0000001 xgrammar False llguidance True
{'minimum': 0} 0.000001 xgrammar True llguidance True
{'minimum': 0} 0.5 xgrammar True llguidance True
{'maximum': 1000000} 1e-7 xgrammar False llguidance False
{'maximum': 1000000} 1E5 xgrammar False llguidance False
{'maximum': 1000000} 0.0000001 xgrammar False llguidance True
{'maximum': 1000000} 0.000001 xgrammar True llguidance True
{'maximum': 1000000} 0.5 xgrammar True llguidance True
{'exclusiveMinimum': 0} 1e-7 xgrammar False llguidance False
{'exclusiveMinimum': 0} 1E5 xgrammar False llguidance False
{'exclusiveMinimum': 0} 0.0000001 xgrammar False llguidance True
{'exclusiveMinimum': 0} 0.000001 xgrammar True llguidance True
{'exclusiveMinimum': 0} 0.5 xgrammar True llguidance True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
