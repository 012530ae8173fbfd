#!/usr/bin/env bash
# Of the chat templates of Seed-OSS and MiniCPM 5, as llama.cpp's collection has them (in the source package of
# llama-cpp-python 0.3.36), a call's list is written as Python's str() writes it, [1, {'x': None}], and a boolean as True.
# That of MiniCPM 5 puts a text with "<", "&" or a line break into <![CDATA[...]]>, as XML has it, and leaves any other
# as it is. That of MiniMax M2, whose form is nearly the same, writes JSON, and so does that of GLM 4.6. Who reads such
# calls as JSON gives a tool the text of a list.
#
# Guessed before: JSON in all four, since their tools are listed as JSON. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check jinja2==3.1.6
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$folder" \
    llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder" --wildcards '*/models/templates/*.jinja'

seen=$(cd "$folder" && "$python" - <<'PYTHON'
import json
import re
from pathlib import Path

from jinja2 import Environment

environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment.filters["tojson"] = lambda value, ensure_ascii=True, **_: json.dumps(value, ensure_ascii=ensure_ascii)
environment.globals["raise_exception"] = lambda message: message
call = {"name": "f", "arguments": {"plain": "a b", "odd": "a < b", "list": [1, {"x": None}], "on": True}}
messages = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
]
for name in ("ByteDance-Seed-OSS", "openbmb-MiniCPM5-1B", "MiniMax-M2", "GLM-4.6"):
    (path,) = Path().glob(f"*/vendor/llama.cpp/models/templates/{name}.jinja")
    text = environment.from_string(path.read_text()).render(messages=messages, tools=None)
    values = re.findall(r"<(?:param\w*[= ][^>]*|arg_value)>(.*?)</(?:param\w*|arg_value)>", text, re.DOTALL)
    print(f"{name}: {' | '.join(value.strip() for value in values)}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
ByteDance-Seed-OSS: a b | a < b | [1, {'x': None}] | True
openbmb-MiniCPM5-1B: a b | <![CDATA[a < b]]> | [1, {'x': None}] | True
MiniMax-M2: a b | a < b | [1, {"x": null}] | true
GLM-4.6: a b | a < b | [1, {"x": null}] | true
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
