#!/usr/bin/env bash
# SGLang 0.5.23 reads the same answer of a model in two ways, by whether it is streamed:
#
# - Hermes' form (`HermesDetector`): a text argument that holds `</tool_call>` is a call in a stream, and
#   no call at all in a whole answer, which becomes text.
# - GLM 4.5's form (`Glm4MoeDetector`): an argument `True` is JSON's true in a whole answer, and in a stream
#   the arguments are `{"t": True}`, which is no JSON; the text argument `null` is "null" in a stream, "None" in a
#   whole answer.
#
# Two implementations parse: one searches the whole text by patterns, the other follows it piece by piece.
# Guessed before: the same call both times. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/calls.py" <<'PYTHON'
import logging

logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
from sglang.srt.function_call.hermes_detector import HermesDetector

kinds = {"s": {"type": "string"}, "t": {"type": "boolean"}}
tool = Tool(type="function", function=Function(name="f", parameters={"type": "object", "properties": kinds}))
hermes = '<tool_call>\n{"name": "f", "arguments": {"s": "%s"}}\n</tool_call>'
glm = "<tool_call>f\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
for name, kind, text in (
    ("hermes", HermesDetector, hermes % "plain"),
    ("hermes, end tag in a text", HermesDetector, hermes % "</tool_call>"),
    ("glm true", Glm4MoeDetector, glm % ("t", "true")),
    ("glm True", Glm4MoeDetector, glm % ("t", "True")),
    ("glm null as a text", Glm4MoeDetector, glm % ("s", "null")),
):
    whole = kind().detect_and_parse(text, [tool]).calls
    parser, streamed = kind(), ""
    for character in text:
        for call in parser.parse_streaming_increment(character, [tool]).calls:
            streamed += call.parameters or ""
    print(f"{name}: whole {[call.parameters for call in whole]} streamed {streamed}")
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  aiohttp==3.14.5 torch==2.13.0 transformers==5.23.0 openai==2.54.0 ipython==9.18.1 msgspec==0.22.0 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 pillow==13.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 starlette==1.10.0 triton==3.9.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23

seen=$("$python" -W ignore "$folder/calls.py")
expected=$(cat <<'TEXT'
hermes: whole ['{"s": "plain"}'] streamed {"s": "plain"}
hermes, end tag in a text: whole [] streamed {"s": "</tool_call>"}
glm true: whole ['{"t": true}'] streamed {"t": true}
glm True: whole ['{"t": true}'] streamed {"t": True}
glm null as a text: whole ['{"s": "None"}'] streamed {"s": "null"}
TEXT
)
printf 'SGLang 0.5.23:\n%s\n' "$seen"
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
