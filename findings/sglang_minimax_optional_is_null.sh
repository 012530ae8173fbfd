#!/usr/bin/env bash
# SGLang 0.5.23 reads calls of MiniMax M2 (`MinimaxM2Detector`) by the types of the tool's schema, and gives null wherever
# null is one of them: {"anyOf": [{"type": "integer"}, {"type": "null"}]}, as pydantic writes `Optional[int]`, is null
# where the model wrote 5. So every optional argument of such a tool arrives as null, in whole and streamed answers, and
# the tool runs without what it was called with. A text argument that is `None` or `nil` is null, too, though the
# schema says string alone. SGLang's reader of Qwen3-Coder's form reads the same values by the same schema as they were written.
#
# Guessed before: 5 in both, and null for `null` alone. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/calls.py" <<'PYTHON'
import logging

logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector

nothing = {"type": "null"}
kinds = {
    "days": {"type": "integer"},
    "limit": {"anyOf": [{"type": "integer"}, nothing]},
    "city": {"anyOf": [{"type": "string"}, nothing]},
    "unit": {"type": ["string", "null"]},
    "level": {"enum": ["low", "high", None]},
    "name": {"type": "string"},
}
tool = Tool(type="function", function=Function(name="f", parameters={"type": "object", "properties": kinds}))
minimax = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="%s">%s</parameter>\n</invoke>\n</minimax:tool_call>'
qwen = "<tool_call>\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"
written = (("days", "5"), ("limit", "5"), ("city", "Oslo"), ("unit", "km"), ("level", "low"), ("name", "None"), ("name", "nil"))
for name, value in written:
    seen = []
    for kind, form in ((MinimaxM2Detector, minimax), (Qwen3CoderDetector, qwen)):
        text = form % (name, value)
        whole = kind().detect_and_parse(text, [tool]).calls
        streamed = kind().parse_streaming_increment(text, [tool]).calls
        seen += [whole[0].parameters, "".join(call.parameters or "" for call in streamed)]
    print(f"{name} {value}: minimax {seen[0]} streamed {seen[1]}, qwen {seen[2]} streamed {seen[3]}")
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  aiohttp==3.14.5 torch==2.13.0 transformers==5.23.0 openai==2.54.0 ipython==9.18.1 msgspec==0.22.0 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 pillow==13.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 starlette==1.10.0 triton==3.9.0
"$python" -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23

seen=$("$python" -W ignore "$folder/calls.py")
expected=$(cat <<'TEXT'
days 5: minimax {"days": 5} streamed {"days": 5}, qwen {"days": 5} streamed {"days": 5}
limit 5: minimax {"limit": null} streamed {"limit": null}, qwen {"limit": 5} streamed {"limit": 5}
city Oslo: minimax {"city": null} streamed {"city": null}, qwen {"city": "Oslo"} streamed {"city": "Oslo"}
unit km: minimax {"unit": null} streamed {"unit": null}, qwen {"unit": "km"} streamed {"unit": "km"}
level low: minimax {"level": null} streamed {"level": null}, qwen {"level": "low"} streamed {"level": "low"}
name None: minimax {"name": null} streamed {"name": null}, qwen {"name": "None"} streamed {"name": "None"}
name nil: minimax {"name": null} streamed {"name": null}, qwen {"name": "nil"} streamed {"name": "nil"}
TEXT
)
printf 'SGLang 0.5.23:\n%s\n' "$seen"
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
