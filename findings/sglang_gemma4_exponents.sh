#!/usr/bin/env bash
# SGLang 0.5.23 (`Gemma4Detector`, --tool-call-parser gemma4) gives a number with an exponent as a text: of a call
# `call:f{rate:1e-7}` the tool gets "1e-7", where 0.0000001 is a number, and so within lists; 1.0e-7, which has a point, is a
# number. null is the text "null", also where the schema has null and no text. The schema is not looked at. Python's
# JSON writes 1e-07 of 0.0000001, so that models meet the form everywhere. Whole and streamed alike.
#
# Guessed before: the number, and null. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  aiohttp==3.14.5 torch==2.13.0 transformers==5.23.0 openai==2.54.0 ipython==9.18.1 msgspec==0.22.0 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 pillow==13.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 starlette==1.10.0 triton==3.9.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23

cat >"$folder/run.py" <<'PYTHON'
import logging

logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.gemma4_detector import Gemma4Detector

number, nothing = {"type": "number"}, {"type": "null"}
optional = {"anyOf": [number, nothing]}
cases = (
    (number, "0.5"), (number, "1e-7"), (number, "1.0e-7"), (number, "1E5"), (optional, "7"), (optional, "null"),
    ({"type": "array", "items": number}, "[0.5,1e-7]"), ({"type": "object"}, "{rate:1e-7,end:null}"),
)
for schema, written in cases:
    parameters = {"type": "object", "properties": {"v": schema}}
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    text = "<|tool_call>call:f{v:" + written + "}<tool_call|>"
    whole = Gemma4Detector().detect_and_parse(text, [tool]).calls[0].parameters
    detector = Gemma4Detector()
    pieces = ["<|tool_call>", *text.removeprefix("<|tool_call>").removesuffix("<tool_call|>"), "<tool_call|>"]
    calls = [call for piece in pieces for call in detector.parse_streaming_increment(piece, [tool]).calls]
    print(f"{written}: {whole}, streamed {''.join(call.parameters or '' for call in calls)}")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
0.5: {"v": 0.5}, streamed {"v": 0.5}
1e-7: {"v": "1e-7"}, streamed {"v": "1e-7"}
1.0e-7: {"v": 1e-07}, streamed {"v": 1e-07}
1E5: {"v": "1E5"}, streamed {"v": "1E5"}
7: {"v": 7}, streamed {"v": 7}
null: {"v": "null"}, streamed {"v": "null"}
[0.5,1e-7]: {"v": [0.5, "1e-7"]}, streamed {"v": [0.5, "1e-7"]}
{rate:1e-7,end:null}: {"v": {"rate": "1e-7", "end": "null"}}, streamed {"v": {"rate": "1e-7", "end": "null"}}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
