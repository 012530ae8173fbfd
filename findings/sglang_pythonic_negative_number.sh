#!/usr/bin/env bash
# SGLang 0.5.23's parser of calls written as Python (`PythonicDetector`, --tool-call-parser pythonic) drops
# a call that has a negative number, a sign or a tuple among its arguments, also deep inside a list; the
# other calls of the same answer are kept. Whole answers and streams do the same, without an error.
#
# Python's grammar has no negative literals: `-2` is an operation on 2, and the parser takes constants,
# lists and dictionaries alone. Guessed before: {"i": -2}. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/calls.py" <<'PYTHON'
import logging

logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.pythonic_detector import PythonicDetector

kinds = {"i": {"type": "integer"}, "l": {"type": "array"}}
tool = Tool(type="function", function=Function(name="f", parameters={"type": "object", "properties": kinds}))
for text in ("[f(i=2)]", "[f(i=-2)]", "[f(l=[1, -1])]", "[f(l=(1, 2))]", "[f(i=-1), f(i=3)]"):
    whole = PythonicDetector().detect_and_parse(text, [tool]).calls
    parser, streamed = PythonicDetector(), ""
    for character in text:
        for call in parser.parse_streaming_increment(character, [tool]).calls:
            streamed += call.parameters or ""
    print(text, "".join(call.parameters for call in whole), streamed)
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  aiohttp==3.14.5 torch==2.13.0 transformers==5.23.0 openai==2.54.0 ipython==9.18.1 msgspec==0.22.0 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 pillow==13.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 starlette==1.10.0 triton==3.9.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23

seen=$("$python" -W ignore "$folder/calls.py")
expected='[f(i=2)] {"i": 2} {"i": 2}
[f(i=-2)]  
[f(l=[1, -1])]  
[f(l=(1, 2))]  
[f(i=-1), f(i=3)] {"i": 3} {"i": 3}'
printf 'SGLang 0.5.23, text, arguments of whole answers and of streams:\n%s\n' "$seen"
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
