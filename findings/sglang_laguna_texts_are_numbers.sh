#!/usr/bin/env bash
# SGLang 0.5.23 reads calls of Laguna (`PoolsideV1Detector`) by JSON wherever `type` is not "string" itself: of `Optional[str]`, as pydantic
# writes it, the text 12 is the number 12, and of {"type": ["string", "null"]} the version 1.10 is 1.1. Of {"enum": ["1", "2"]}
# the tool gets 1, which is none of the two, of {"const": "5"} 5, and of a `$ref` to a text a number, though 007 stays a text.
# A text's last line end is gone. The reader of GLM 4.7's form, which is the same but for line breaks, gives the texts.
# Whole and streamed alike.
#
# Guessed before: texts, since each of these schemas admits texts alone (and null). Found 2026-11-30.
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
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector
from sglang.srt.function_call.poolside_v1_detector import PoolsideV1Detector

text, nothing = {"type": "string"}, {"type": "null"}
cases = (
    (text, "12"), ({"anyOf": [text, nothing]}, "12"), ({"type": ["string", "null"]}, "1.10"), ({"enum": ["1", "2"]}, "1"),
    ({"const": "5"}, "5"), ({"$ref": "#/$defs/Code"}, "007"), ({"$ref": "#/$defs/Code"}, "12"), (text, "line\n"),
)
laguna = "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
glm = "<tool_call>f<arg_key>v</arg_key><arg_value>%s</arg_value></tool_call>"
for schema, written in cases:
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"Code": text}}
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    seen = []
    for kind, form in ((PoolsideV1Detector, laguna), (Glm47MoeDetector, glm)):
        whole = kind().detect_and_parse(form % written, [tool]).calls[0].parameters
        detector = kind()
        calls = [call for piece in (form % written).split("@") for call in detector.parse_streaming_increment(piece, [tool]).calls]
        seen += [whole, "".join(call.parameters or "" for call in calls)]
    print(f"{schema} {written!r}: laguna {seen[0]} streamed {seen[1]}, glm47 {seen[2]} streamed {seen[3]}")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{'type': 'string'} '12': laguna {"v": "12"} streamed {"v": "12"}, glm47 {"v": "12"} streamed {"v": "12"}
{'anyOf': [{'type': 'string'}, {'type': 'null'}]} '12': laguna {"v": 12} streamed {"v": 12}, glm47 {"v": "12"} streamed {"v": "12"}
{'type': ['string', 'null']} '1.10': laguna {"v": 1.1} streamed {"v": 1.1}, glm47 {"v": "1.10"} streamed {"v": "1.10"}
{'enum': ['1', '2']} '1': laguna {"v": 1} streamed {"v": 1}, glm47 {"v": "1"} streamed {"v": "1"}
{'const': '5'} '5': laguna {"v": 5} streamed {"v": 5}, glm47 {"v": "5"} streamed {"v": "5"}
{'$ref': '#/$defs/Code'} '007': laguna {"v": "007"} streamed {"v": "007"}, glm47 {"v": "007"} streamed {"v": "007"}
{'$ref': '#/$defs/Code'} '12': laguna {"v": 12} streamed {"v": 12}, glm47 {"v": "12"} streamed {"v": "12"}
{'type': 'string'} 'line\n': laguna {"v": "line"} streamed {"v": "line"}, glm47 {"v": "line\n"} streamed {"v": "line\n"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
