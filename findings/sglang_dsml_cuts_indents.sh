#!/usr/bin/env bash
# SGLang 0.5.23 (`DeepSeekV32Detector`, --tool-call-parser deepseekv32) cuts white space off both ends of a text argument of DeepSeek V3.2's
# calls (DSML), though `string="true"` says that the text is the value: a line of code loses its indent, a file its last line end,
# and a text that is a line end is empty. The same call with its arguments as JSON, which the form has as well, keeps them, and
# so does the reader of V3.1's form. Whole and streamed alike. A tool that replaces a line in a file finds no such line.
#
# Guessed before: the text between the tags. Found 2026-11-30.
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
from sglang.srt.function_call.deepseekv31_detector import DeepSeekV31Detector
from sglang.srt.function_call.deepseekv32_detector import DeepSeekV32Detector

import json

mark = "｜DSML｜"
tool = Tool(type="function", function=Function(name="write", parameters={"type": "object", "properties": {"text": {"type": "string"}}}))
for text in ("  return x", "name = 1\n", "\n", "a  b"):
    tagged = f'<{mark}function_calls>\n<{mark}invoke name="write">\n<{mark}parameter name="text" string="true">{text}</{mark}parameter>\n</{mark}invoke>\n</{mark}function_calls>'
    body = json.dumps({"text": text})
    direct = f'<{mark}function_calls>\n<{mark}invoke name="write">\n{body}\n</{mark}invoke>\n</{mark}function_calls>'
    older = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    whole = DeepSeekV32Detector().detect_and_parse(tagged, [tool]).calls[0].parameters
    detector = DeepSeekV32Detector()
    pieces = tagged.replace(">", ">\0").split("\0")
    streamed = "".join(call.parameters or "" for piece in pieces for call in detector.parse_streaming_increment(piece, [tool]).calls)
    as_json = DeepSeekV32Detector().detect_and_parse(direct, [tool]).calls[0].parameters
    before = DeepSeekV31Detector().detect_and_parse(older, [tool]).calls[0].parameters
    print(f"{body}: V3.2 in tags {whole}, streamed {streamed}, as JSON {as_json}; V3.1 {before}")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"text": "  return x"}: V3.2 in tags {"text": "return x"}, streamed {"text": "return x"}, as JSON {"text": "  return x"}; V3.1 {"text": "  return x"}
{"text": "name = 1\n"}: V3.2 in tags {"text": "name = 1"}, streamed {"text": "name = 1"}, as JSON {"text": "name = 1\n"}; V3.1 {"text": "name = 1\n"}
{"text": "\n"}: V3.2 in tags {"text": ""}, streamed {"text": ""}, as JSON {"text": "\n"}; V3.1 {"text": "\n"}
{"text": "a  b"}: V3.2 in tags {"text": "a  b"}, streamed {"text": "a  b"}, as JSON {"text": "a  b"}; V3.1 {"text": "a  b"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
