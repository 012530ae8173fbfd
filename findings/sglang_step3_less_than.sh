#!/usr/bin/env bash
# SGLang 0.5.23 leaves an argument of a Step 3 call (`Step3Detector`) out where its text has a `<`: code, HTML, a comparison. The
# call itself stays, with the arguments that are left, so that the tool runs without it: `{}` in a whole answer; in a stream no
# text of arguments at all if it was the only one, which is no JSON. White space at the ends of a text is cut off, an indent
# too. The value's pattern is `[^<]*`; vLLM 0.33.0's reader of the same form has `.*?` in its place.
#
# Guessed before: the text up to the closing tag. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/calls.py" <<'PYTHON'
import logging

logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.step3_detector import Step3Detector

kinds = {"code": {"type": "string"}, "line": {"type": "integer"}}
tool = Tool(type="function", function=Function(name="f", parameters={"type": "object", "properties": kinds}))
argument = '<steptml:parameter name="%s">%s</steptml:parameter>\n'
begin = '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
end = "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
for arguments in (
    {"code": "x > 1"},
    {"code": "x < 1"},
    {"line": "5", "code": "<p>"},
    {"code": "  return x"},
):
    text = begin + "".join(argument % pair for pair in arguments.items()) + end
    whole = Step3Detector().detect_and_parse(text, [tool]).calls
    parser, streamed = Step3Detector(), []
    for character in text:
        streamed += parser.parse_streaming_increment(character, [tool]).calls
    names = [call.name for call in streamed if call.name]
    pieces = "".join(call.parameters or "" for call in streamed)
    print(arguments, "whole", whole[0].name, whole[0].parameters, "streamed", *names, repr(pieces))
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  aiohttp==3.14.5 torch==2.13.0 transformers==5.23.0 openai==2.54.0 ipython==9.18.1 msgspec==0.22.0 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 pillow==13.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 starlette==1.10.0 triton==3.9.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23

seen=$("$python" -W ignore "$folder/calls.py")
expected=$(cat <<'TEXT'
{'code': 'x > 1'} whole f {"code": "x > 1"} streamed f '{"code": "x > 1"}'
{'code': 'x < 1'} whole f {} streamed f ''
{'line': '5', 'code': '<p>'} whole f {"line": 5} streamed f '{"line": 5}'
{'code': '  return x'} whole f {"code": "return x"} streamed f '{"code": "return x"}'
TEXT
)
printf 'SGLang 0.5.23:\n%s\n' "$seen"
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
