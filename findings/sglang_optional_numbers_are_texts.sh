#!/usr/bin/env bash
# SGLang 0.5.23 reads a number as a text where its parameter is optional: of `Optional[int]`, as pydantic writes it, the readers of MiMo
# (`MiMoDetector`) and MiniMax M3 (`MinimaxM3Detector`) give the tool "5", whole and streamed, and so does each of three of a `$ref` to an
# integer. The reader of Hunyuan (`HunyuanDetector`) gives 5, and null as the text "null"; of a call whose parameter has a list of types
# ({"type": ["integer", "null"]}, as zod and TypeBox write it) it finds no call at all. MiMo's makes null of the text "null", whatever
# the schema says. An integer that is required is 5 in all three.
#
# Guessed before: 5, and null where the schema has null. Found 2026-11-30.
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
from sglang.srt.function_call.hunyuan_detector import HunyuanDetector
from sglang.srt.function_call.mimo_detector import MiMoDetector
from sglang.srt.function_call.minimax_m3 import MinimaxM3Detector

mark = "]<]minimax[>["
mimo = "<tool_call>\n<function=f>\n<parameter=v>%s</parameter>\n</function>\n</tool_call>"
hunyuan = "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>v</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>\n</tool_calls>"
minimax = f'{mark}<tool_call>{mark}<invoke name="f">{mark}<v>%s{mark}</v>{mark}</invoke>{mark}</tool_call>'
number, text, nothing = {"type": "integer"}, {"type": "string"}, {"type": "null"}
cases = (
    (number, "5"), ({"anyOf": [number, nothing]}, "5"), ({"$ref": "#/$defs/Days"}, "5"),
    ({"anyOf": [text, nothing]}, "null"), (text, "null"),
)
for schema, written in cases:
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"Days": number}}
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    seen = []
    for name, kind, form in (("mimo", MiMoDetector, mimo), ("hunyuan", HunyuanDetector, hunyuan), ("minimax m3", MinimaxM3Detector, minimax)):
        whole = kind().detect_and_parse(form % written, [tool]).calls
        detector = kind()
        calls = [call for piece in (form % written).split("@") for call in detector.parse_streaming_increment(piece, [tool]).calls]
        streamed = "".join(call.parameters or "" for call in calls)
        seen.append(f"{name} {whole[0].parameters}" + (f" (streamed {streamed})" if streamed != whole[0].parameters else ""))
    print(f"{schema} {written}: {', '.join(seen)}")
for schema in ({"type": ["integer", "null"]}, {"type": ["string", "null"]}):
    tool = Tool(type="function", function=Function(name="f", parameters={"type": "object", "properties": {"v": schema}}))
    print(f"{schema} 5: hunyuan {HunyuanDetector().detect_and_parse(hunyuan % '5', [tool]).calls or 'no call'}")
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{'type': 'integer'} 5: mimo {"v": 5}, hunyuan {"v": 5}, minimax m3 {"v": 5}
{'anyOf': [{'type': 'integer'}, {'type': 'null'}]} 5: mimo {"v": "5"}, hunyuan {"v": 5}, minimax m3 {"v": "5"}
{'$ref': '#/$defs/Days'} 5: mimo {"v": "5"}, hunyuan {"v": "5"}, minimax m3 {"v": "5"}
{'anyOf': [{'type': 'string'}, {'type': 'null'}]} null: mimo {"v": null}, hunyuan {"v": "null"}, minimax m3 {"v": null}
{'type': 'string'} null: mimo {"v": null}, hunyuan {"v": "null"}, minimax m3 {"v": "null"}
{'type': ['integer', 'null']} 5: hunyuan no call
{'type': ['string', 'null']} 5: hunyuan no call
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
